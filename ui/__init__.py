"""The browser page: static files, and the Markdown of answers as HTML that is safe to show."""
