"""Items of section K that are not run here, and why. Every other number from 1 to 215 has a test."""

from __future__ import annotations

NOT_RUN: dict[int, str] = {}
"""Reasons begin with "bound to an AMD card: ", "K15, " or "K16, "."""
