"""The terminal: command lines, progress and folders of results."""
