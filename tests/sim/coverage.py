"""What a run of many seeds has to have done at least, or it has shown too little."""

from __future__ import annotations

from collections.abc import Mapping

FULL_RUN_SEEDS = 2000
TIMES_MIN = 100  # in a full run, each
ELECTIONS = ("first", "restart", "handover", "failover", "unclean", "recreated", "forced")
WANTED = (
    *(f"epochs by {reason}" for reason in ELECTIONS),
    "truncations",
    "set shrinks",
    "leaves",
    "generations raised",
    "positions fenced",
    "lease writes without an answer",
    "lease writes without an answer, carried out",
    "sends refused for want of copies",
    "copied messages shown from the start",
    "fault: lease deleted",
    "fault: lease out of reach",
    "fault: loses its disk",
    "fault: loses its power",
    "fault: loses unsynced records",
    "fault: paused",
    "fault: clock ahead",
    "fault: clock behind",
    "deliveries by a clock that others correct",
    "fault: killed",
    "fault: client paused",
    "fault: client killed",
    "fault: client cut off",
    "fault: alone with clients",
    "batches that came again",
    "snapshots that retention wanted",
    "send-backs",
    "send-backs without an answer",
    "dead letters in the end",
    "resets",
    "questions that end with an answer",
    "questions that end with CLIENT_GONE",
    "questions that end with CLIENT_NOT_FOUND",
    "questions that end with QUESTION_TIMEOUT",
    "questions that end with REMOTE_QUESTIONS_OFF",
    "answers of strangers refused",
    "answers that came too late",
    "second answers refused",
    "ends told",
    "ends not told: OFFSET_NOT_AVAILABLE",
    "commits refused for a reset",
    "queues taken",
    "locks that went to another number",
    "leases that ended",
    "locks lost",
    "timers delivered",
    "timers recalled",
    "recalled too late",
    "halves committed",
    "halves rolled back",
    "halves given up",
    "runs of halves",
    "halves ended as runs",
    "checks answered",
    "transactions whose end is lost",
    "opposite ends refused",
    "acknowledged messages",
    "received again",
    "received and forgotten",
    "invisible times changed",
)


def missing(counts: Mapping[str, int], seeds: int) -> list[str]:
    """What happened too seldom in a run of so many seeds."""
    least = TIMES_MIN * min(seeds, FULL_RUN_SEEDS) // FULL_RUN_SEEDS
    return [f"{what}: {counts[what]}, not {least}" for what in WANTED if counts[what] < least]


def report(counts: Mapping[str, int]) -> str:
    """All that was counted, for people."""
    return "\n".join(f"{counts[what]:9}  {what}" for what in sorted(counts))
