"""Conversations: kept in a file on this computer, answered whether or not a page looks, seen by all pages."""
