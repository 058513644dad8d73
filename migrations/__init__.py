"""Alembic's revisions of the schema in storage/schema.py; run by `platemaker db upgrade`."""
