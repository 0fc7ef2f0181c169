"""One module an area: its name is the area's, its docstring's first line the area's title, `measure` its work."""
