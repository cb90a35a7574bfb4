"""The command line: `oomb train`."""
