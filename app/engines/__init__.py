"""Engines that work beside the event loop: in a thread of this process, or in a process of their own."""
