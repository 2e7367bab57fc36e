"""Tools of MCP servers, for chats of the page."""
