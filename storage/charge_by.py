"""Whose usage is added up. By itself, so that a command line can say it without a database library."""

from enum import StrEnum


class ChargeBy(StrEnum):
    TENANT = "tenant"
    JOB = "job"
    DOCUMENT = "document"
