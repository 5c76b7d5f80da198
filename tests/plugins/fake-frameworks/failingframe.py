"""A framework that fails to import."""

raise RuntimeError("no accelerator")
