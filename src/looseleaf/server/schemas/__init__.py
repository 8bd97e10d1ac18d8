"""Bodies of requests and answers, as pydantic models. pydantic is used here and nowhere else."""

from __future__ import annotations
