"""Which methods a writer answers only while no other member can be the writer.

They give something away that a successor may give to others: messages, locks, queues, questions
about halves, replies; or they say what holds from now on. The other methods, and why they need no
lease, are in ``docs/protocol.md``; a test compares.
"""

from __future__ import annotations

BROKER, ADMIN = "/cometmq.v1.BrokerService/", "/cometmq.v1.BrokerAdminService/"
_CLIENTS = (
    "JoinGroup",
    "CommitOffsets",
    "LockQueues",
    "UnlockQueues",
    "SendBack",
    "Recall",
    "EndTransactions",
    "CheckTransactions",
    "Replies",
    "Receive",
    "AckMessages",
    "ChangeInvisibleTime",
    "QueryAssignment",
    "QueryOffsets",
)
_OPERATORS = (
    "PutTopic",
    "PutQuota",
    "DropQuota",
    "DeleteTopic",
    "PutGroup",
    "DeleteGroup",
    "RemoveMembers",
    "ResetOffsets",
    "ForgetOffsets",
    "ResendDeadLetters",
    "ResendMessages",
    "PurgeDeadLetters",
    "ResumeChecks",
    "DropHalves",
)
# By full name. The right is asked for when the answer leaves, on a stream for each message.
UNDER_LEASE = frozenset(
    [BROKER + name for name in _CLIENTS] + [ADMIN + name for name in _OPERATORS]
)
