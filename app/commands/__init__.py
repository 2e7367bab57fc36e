"""The command line's commands and options."""
