"""The commands, one file for each group. `pipeline.cli` puts them together.

Imports inside the commands keep `platemaker --help` under half a second: database, queue and model libraries are
loaded by the commands that use them.
"""
