"""Build objects from the configuration, and check what was built. No other code does.

A file for each kind of part. `objects` calls a target: its errors name the configuration key, and exceptions that
aren't ours keep their traceback.
"""
