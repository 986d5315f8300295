"""The numerical law: whatever the configuration, parameters after some steps equal those of one process on the whole
batch.
"""
