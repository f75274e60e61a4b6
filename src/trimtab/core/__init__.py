"""The standard-library foundation: errors, records, units, atomic files, optional imports, registries.

Nothing here imports anything but the standard library, so that every verb that needs no accelerator starts at once.
"""
