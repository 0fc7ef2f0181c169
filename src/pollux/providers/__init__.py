"""Where nodes come from: this machine, or an engine that runs elsewhere. One module or package for each of them.

They know core and wire, and each other not at all. What every one must do is `pollux.testing.ProviderContract`.
"""
