"""The services behind the page."""
