"""Items of section K that are not run here, and why. Every other number from 1 to 215 has a test."""

from __future__ import annotations

CARD = "bound to an AMD card: "

NOT_RUN: dict[int, str] = {
    163: CARD
    + "the copy kernel; here chunks are copied by the runtime's own copies, and there is no kernel to misuse",
    212: CARD + "looking hipAmdFileRead and hipAmdFileWrite up in a loaded HIP runtime",
}
