"""Reports for people: in the terminal, as Markdown, as one HTML file, and two side by side."""
