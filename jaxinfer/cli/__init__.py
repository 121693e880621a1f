"""The command line: `jaxinfer COMMAND`, commands found by the entry-point group `jaxinfer.commands`."""
