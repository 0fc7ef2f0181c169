"""Speed and quality figures of Pollux, each beside a baseline of the same run: `make bench [ONLY=area]`.

A new area is one file, `areas/<area>.py`, with a function `measure` that yields what `measurement` defines. The
figures are kept in results.json, what surrounds them in context.json, and RESULTS.md is rendered from the two.
"""
