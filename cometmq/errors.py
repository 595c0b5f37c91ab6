"""The error catalogue: every error of CometMQ, its code, what a client may do, what a user does.

CometError
├── RequestError       the request is wrong; sending it again will not help
├── MissingError       what the request names is not there
├── ConflictError      the request was right once; the world has moved on
├── BusyError          not now: later, or elsewhere
├── StoreError         the disk or what lies on it
├── InternalError      a fault of ours
└── UnknownError       an error of a newer release

A new error is a new leaf class with an unused ``code``. Codes are never reused; ``docs/errors.md``
lists them, and ``tests/unit/test_errors.py`` proves that list, classes and wire mapping agree.
gRPC statuses are named, not imported.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar, Self


class Retry(Enum):
    """What a client may do with a refused request; values of ``cometmq.v1.Retry``."""

    NEVER = 1  # the same request will be refused again
    LATER = 2  # the same request to the same broker may succeed after a back-off
    AFTER_ROUTE = 3  # ask a name server for the route first


class CometError(Exception):
    """Base of the catalogue. ``message`` says what happened, ``advice`` what to do next,
    ``str(error)`` both: it is what a traceback shows.

    ``segment`` names the segment of a batch that was refused (from 0), ``fence`` is the
    (generation, offset) at which the caller of a fenced position continues, ``epoch`` the broker
    group's epoch where the caller's is older, ``retry_after_ms`` when the same request may succeed,
    if the sender knows.
    """

    code: ClassVar[int] = 0  # 0 marks the abstract classes
    status: ClassVar[str] = "UNKNOWN"  # name of the gRPC status of a refused unary call
    retry: ClassVar[Retry] = Retry.NEVER
    advice: str = ""  # of the class; an error that knows more has its own

    def __init__(
        self,
        message: str,
        *,
        segment: int | None = None,
        fence: tuple[int, int] | None = None,
        epoch: int | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.segment = segment
        self.fence = fence
        self.epoch = epoch
        self.retry_after_ms = retry_after_ms

    def __str__(self) -> str:
        if not self.advice or self.advice in self.message:  # of an error that it was made of
            return self.message
        end = "" if self.message.endswith((".", "!", "?")) else "."
        return f"{self.message}{end} {self.advice}"

    def after(self, refusal: CometError | None) -> Self:
        """The error of a caller that has tried until its time was over: its text has what the last
        try was refused with, which is its ``__cause__``, too.
        """
        if refusal is not None:
            self.message = f"{self.message} The last refusal: {refusal.name()}: {refusal}"
            self.args = (self.message,)
            self.__cause__ = refusal
        return self

    def advising(self, advice: str) -> Self:
        """The error, with advice that fits this case better than that of its class."""
        self.advice = advice
        return self

    @classmethod
    def name(cls) -> str:
        """The stable name: ``TopicNotFound`` → ``TOPIC_NOT_FOUND``."""
        return "".join("_" + c if c.isupper() else c.upper() for c in cls.__name__).lstrip("_")


class RequestError(CometError):
    """The request is wrong; sending it again will not help."""

    status = "INVALID_ARGUMENT"


class MissingError(CometError):
    """What the request names is not there."""

    status = "NOT_FOUND"


class ConflictError(CometError):
    """The request was right once; the world has moved on."""

    status = "FAILED_PRECONDITION"


class BusyError(CometError):
    """The request may succeed later, or at another member."""

    status = "UNAVAILABLE"
    retry = Retry.LATER


class StoreError(CometError):
    """The disk, or what lies on it."""

    status = "INTERNAL"


# --- 1000: the request is wrong -----------------------------------------------------------------


class InvalidRequest(RequestError):
    """A field of the request is missing, malformed or out of its range; the message names it."""

    code = 1000
    advice = "Correct what the message names, then try again."


class TopicNameInvalid(RequestError):
    """The topic name breaks the rules of names."""

    code = 1001
    advice = (
        "Use at most 127 characters, namespace and '%' included: letters, digits, '|', '_' and "
        "'-', at least one letter or digit."
    )


class GroupNameInvalid(RequestError):
    """The consumer group name breaks the rules of names."""

    code = 1002
    advice = (
        "Use at most 120 characters, namespace and '%' included: letters, digits, '|', '_' and "
        "'-', at least one letter or digit. Names that begin with CID_RMQ_SYS_ are the system's."
    )


class QueueCountInvalid(RequestError):
    """The number of queues is out of range."""

    code = 1003
    advice = "Ask for 1 to 1024 queues."


class BodyTooLarge(RequestError):
    """A message body is above the limit."""

    code = 1004
    advice = (
        "Keep message bodies under the broker's limit (4 MiB by default): "
        "send a reference to large data instead."
    )


class PropertiesTooLarge(RequestError):
    """A message's properties are above the limit."""

    code = 1005
    advice = (
        "Keep all properties of a message together (tags and keys included) under 32,767 bytes."
    )


class PropertiesInvalid(RequestError):
    """A property list is not framed as names and values."""

    code = 1006
    advice = (
        "Give every property a non-empty UTF-8 name and value without the control characters 1 "
        "and 2."
    )


class PropertyReserved(RequestError):
    """A producer set a property that only the queue may set."""

    code = 1007
    advice = (
        "Choose another property name: this one belongs to the queue itself "
        "(docs/format/properties.md lists them)."
    )


class BatchMalformed(RequestError):
    """The bytes of a batch are not the records that its segments describe."""

    code = 1008
    advice = (
        "Encode records as docs/format/record.md says, and let the segments describe all of "
        "them in order."
    )


class BatchChecksumMismatch(RequestError):
    """The CRC-32 of the batch differs from the one that was sent with it."""

    code = 1009
    advice = (
        "The batch changed on its way: send it again; if it happens again look for a broken "
        "proxy or memory."
    )


class BodyChecksumMismatch(RequestError):
    """A record's body CRC differs from its body."""

    code = 1010
    advice = "Store the CRC-32 of the body, its top bit cleared, in the record's BODYCRC field."


class RecordFieldForbidden(RequestError):
    """A producer set a record field that only the broker may set."""

    code = 1011
    advice = "Leave the named record field at zero: only the broker sets it."


class BatchTooLarge(RequestError):
    """A batch has too many bytes or too many records."""

    code = 1012
    advice = "Split the batch: the stream's first message has the broker's limits."


class OffsetInvalid(RequestError):
    """A queue offset is negative or otherwise impossible."""

    code = 1013
    advice = "Queue offsets count from 0."


class FilterInvalid(RequestError):
    """A tag expression or an SQL expression cannot be understood."""

    code = 1014
    advice = (
        "Name at most 256 tags of 1 to 256 bytes each, without '|' and control characters, or "
        "one SQL92 expression of at most 2,047 characters, such as \"price > 5 AND region = 'eu'\"."
    )


class MessageIdInvalid(RequestError):
    """The text is not a message id."""

    code = 1015
    advice = (
        "A message id is '<broker group>/<log offset>', or RocketMQ's 32 or 56 hexadecimal digits."
    )


class ConfigInvalid(RequestError):
    """An option has no or a bad value, or an address cannot be used."""

    code = 1016
    advice = (
        "Correct the option; docs/reference/options.md and --help list all with units and ranges."
    )


class ConfigUnknownKey(RequestError):
    """There is no option of this name."""

    code = 1017
    advice = "Remove or correct the option's name; the program's --help lists all options."


class DelayLevelInvalid(RequestError):
    """There is no such delay level."""

    code = 1020
    advice = (
        "Choose a delay level from 1 (1 s) to 18 (2 h), or of the broker's list "
        "message_delay_level, or 0 for none: docs/client.md has them."
    )


class InvisibleTimeInvalid(RequestError):
    """An invisible time is too short or too long."""

    code = 1040
    advice = "Ask for 10 s to 12 h."


class DelayInvalid(RequestError):
    """A message names no time at which it can be delivered, or one too far away."""

    code = 1031
    advice = (
        "Give the message a delay of 0 ms or more, or a time from 2001 on, at most "
        "timer_max_delay_sec from now; 40 days is the most that a broker can be given."
    )


class RecallHandleInvalid(RequestError):
    """This names no delayed message of this broker group."""

    code = 1032
    advice = (
        "Give the recall_handle of the message's receipt as it is, to the broker group that stored "
        "the message. Handles are good for 41 days."
    )


class BodyCompressionInvalid(RequestError):
    """A message's body is compressed, and cannot be decompressed within the limit."""

    code = 1021
    advice = (
        "Look at the message's producer; `message.stored_body` has the bytes as stored. Bodies of "
        "LZ4 and Zstandard need the packages of `cometmq[compression]`."
    )


class MessageTypeMismatch(RequestError):
    """The topic takes messages of another type."""

    code = 1030
    advice = (
        "Send to a topic of this type, or change the topic's: cometmq topic update NAME "
        "--message-type TYPE; topics of type unspecified and mixed take every message."
    )


class Unauthenticated(RequestError):
    """The caller did not prove that it knows the cluster's secret."""

    code = 1018
    status = "UNAUTHENTICATED"
    advice = (
        "Give the caller the cluster's secret: option internal_secret_file of the processes, "
        "--internal-secret-file or COMETMQ_INTERNAL_SECRET_FILE of the cometmq command."
    )


class ReplyInvalid(RequestError):
    """No requester waits for the reply, or the message is no request."""

    code = 1060
    advice = (
        "Reply to messages that Producer.request has sent: they have the properties "
        "CORRELATION_ID, REPLY_TO_CLIENT and TTL; a reply has the first two and MSG_TYPE = reply."
    )


# --- 2000: not there ----------------------------------------------------------------------------


class TopicNotFound(MissingError):
    """The topic is not known here."""

    code = 2000
    retry = Retry.AFTER_ROUTE
    advice = (
        "Create it: cometmq topic create NAME. If it is there, its brokers are not registered yet: "
        "see cometmq cluster status."
    )


class QueueNotFound(MissingError):
    """The topic has no queue of this number here."""

    code = 2001
    retry = Retry.AFTER_ROUTE
    advice = "Ask for the route again: the topic has fewer queues on this broker group."


class GroupNotFound(MissingError):
    """The group is not known here."""

    code = 2002
    advice = (
        "Check the name: cometmq group list shows the groups, cometmq cluster status the broker "
        "groups."
    )


class MessageNotFound(MissingError):
    """No message is stored at this place."""

    code = 2003
    advice = "The message was never stored here, or its retention time is over."


class TransactionNotFound(MissingError):
    """There is no half message at this place with this transaction id."""

    code = 2010
    advice = (
        "See cometmq transaction list, and with --given-up those that no producer has ended. A "
        "client names a half as the answer to its send, or the check, did."
    )


class ClientNotFound(MissingError):
    """No client of this name is connected here."""

    code = 2070
    retry = Retry.LATER
    advice = (
        "See cometmq client list. Clients join a broker again within seconds after its restart or "
        "a fail-over. One that assigns queues itself, or has sent nothing yet, cannot be found."
    )


class QuestionNotFound(MissingError):
    """The answer is to a question that this client was not asked, or whose time is over."""

    code = 2071
    advice = (
        "Answer each question once, within its time, under the client_id that the stream it came "
        "on has."
    )


class RouteNotFound(MissingError):
    """No broker serves the topic now."""

    code = 2004
    retry = Retry.LATER
    advice = (
        "No broker that serves the topic is registered: see cometmq cluster status and the "
        "brokers' logs."
    )


# --- 3000: the world has moved on ---------------------------------------------------------------


class PositionFenced(ConflictError):
    """The position belongs to an older generation of the queue and no longer holds."""

    code = 3000
    status = "ABORTED"
    advice = (
        "Go on at the position that the error carries: what lay above it was lost in a crash "
        "or belongs to a deleted topic."
    )


class StaleEpoch(ConflictError):
    """The sender belongs to an older incarnation of the broker group."""

    code = 3001
    advice = (
        "A newer incarnation of this broker group's writer is registered: stop the older process."
    )


class NoPermission(ConflictError):
    """The topic's permission does not allow this."""

    code = 3002
    status = "PERMISSION_DENIED"
    retry = Retry.AFTER_ROUTE
    advice = (
        "The topic is closed for this here: see its permission with cometmq topic list; "
        "system topics are never open."
    )


class ShapeConflict(ConflictError):
    """The folder holds the data of a local cluster of another shape."""

    code = 3005
    advice = (
        "Start it as it was (cometmq local up without these options), or give the new cluster a "
        "folder of its own (--dir); cometmq local down --purge removes the old data."
    )


class LocalStateInvalid(ConflictError):
    """The file of a local cluster's processes is not this user's, or is no such file."""

    code = 3007
    advice = (
        "If you did not start this cluster, leave the folder alone. Else stop its processes, and "
        "move the file away: stores in the folder stay, and the next cometmq local up finds them."
    )


class GroupInUse(ConflictError):
    """The consumer group has members, or static ones that are away."""

    code = 3006
    advice = (
        "Stop its consumers first: cometmq group members NAME shows them. A member that is away "
        "goes with --remove CLIENT_ID. One that joins afterwards creates the group again."
    )


class IndexDisabled(ConflictError):
    """This member keeps no key index."""

    code = 3004
    advice = (
        "Set message_index_enable on the members of the broker group; the index is then built "
        "from the log."
    )


class AlreadyResent(ConflictError):
    """A message was sent again before, or is one that was sent again."""

    code = 3020
    advice = "Send it once more with --again, if its consumers are to have it twice."


class QueueLocked(ConflictError):
    """Another client of the group has the lock of this queue, or the lock number is old."""

    code = 3022
    advice = (
        "Lock the queue again, and continue at the committed position once it is granted. The lock "
        "of the other client ends 15 s after its last renewal."
    )


class OffsetReset(ConflictError):
    """The group was reset in this queue, and the commit is of what it did before."""

    code = 3023
    advice = (
        "Go on at the position that the error carries, and commit with the reset number that "
        "comes with it: the SDK does so."
    )


class HandleInvalid(ConflictError):
    """The handle is not of this group and broker group, or its messages are another member's."""

    code = 3040
    advice = (
        "A message that is not acknowledged is redelivered, to this member or another one. "
        "Acknowledge messages before their invisible time is over, or change it while the work "
        "continues."
    )


class GroupModeMismatch(ConflictError):
    """The group gets its messages in the other way: it pulls, or it receives (POP)."""

    code = 3041
    advice = (
        "Use a consumer of the group's mode (cometmq group info NAME --wide), or change the "
        "group's: cometmq group update NAME --mode pull or --mode pop."
    )


class ClientIdInUse(ConflictError):
    """Another client has joined the group under the same client id."""

    code = 3026
    advice = "Give each client of a group a client_id of its own, and start this one again."


class TransactionEnded(ConflictError):
    """The transaction of a half message has ended otherwise, or the half was given up."""

    code = 3030
    advice = (
        "Nothing is left to do for this half: what became of it stays. A half that was given up is "
        "in TRANS_CHECK_MAX_TIME_TOPIC: cometmq transaction resume brings it back."
    )


class BatchOutsideWindow(ConflictError):
    """A batch was sent again so late that the broker no longer knows where it was stored."""

    code = 3021
    advice = (
        "Find the messages by their unique ids (cometmq message query) before you send them again: "
        "some of them are stored."
    )


class NotWriter(ConflictError):
    """Only the writer of a broker group can do this, and this member is not it."""

    code = 3010
    retry = Retry.AFTER_ROUTE
    advice = "Ask a name server for the route: another member of the group is its writer now."


class NoFollower(ConflictError):
    """No follower can take over now."""

    code = 3011
    retry = Retry.LATER
    advice = "Wait until a follower is connected and has caught up: see cometmq cluster status."


class VersionUnsupported(ConflictError):
    """The releases of two members of a broker group do not fit."""

    code = 3012
    advice = (
        "Run one release on all members of a broker group, or two that follow each other, and "
        "start members that are away: docs/how-to/upgrade.md. Followers try again by themselves."
    )


class NotFollower(ConflictError):
    """The call is for a follower; this member writes, or has no group."""

    code = 3015
    advice = "See which member writes: cometmq cluster status."


class MemberIdTaken(ConflictError):
    """Another process follows the writer under the same member id."""

    code = 3016
    retry = Retry.LATER
    advice = (
        "Give every member of a broker group a member_id of its own; a member whose disk was "
        "replaced is taken in once its old process is gone."
    )


class LeaseConflict(ConflictError):
    """Another member has changed the lease of a broker group meanwhile."""

    code = 3013
    retry = Retry.LATER
    advice = "Nothing to do: members read the lease again and decide."


class ReplicationBroken(ConflictError):
    """A replication stream does not fit the follower's log, or changed on its way."""

    code = 3014
    retry = Retry.LATER
    advice = "The follower connects again; if it happens again look for a broken network or disk."


class RequestExpired(ConflictError):
    """The request's time is over: the requester no longer waits for a reply."""

    code = 3060
    advice = "Nothing to do: the requester got an error. Give requests more time, or reply sooner."


class RemoteQuestionsOff(ConflictError):
    """The client's options refuse this question."""

    code = 3070
    status = "PERMISSION_DENIED"
    advice = (
        "The application decides it: options remote_questions_enable and remote_verify_enable of "
        "the client."
    )


class QuestionUnsupported(ConflictError):
    """The client's version, or its kind, does not know this question."""

    code = 3071
    advice = (
        "Only push consumers consume a message that they are asked to. Of another kind of client, "
        "or an older one, cometmq client list shows what the broker knows."
    )


class TopicNotSubscribed(ConflictError):
    """The client does not read the topic of the message."""

    code = 3072
    advice = "Ask a member that reads the topic: cometmq client info ID shows what a client reads."


class ClusterRunning(ConflictError):
    """A local cluster is already up in this folder."""

    code = 3003
    advice = (
        "Stop it first (cometmq local down), or give the new cluster a folder of its own (--dir)."
    )


# --- 4000: not now ------------------------------------------------------------------------------


class FlowControl(BusyError):
    """The broker holds as many unfinished bytes as it may, or a quota is used up."""

    code = 4000
    status = "RESOURCE_EXHAUSTED"
    advice = (
        "Too many bytes wait for their acknowledgement, or a quota is used up: send the same "
        "request again after a back-off, or after `retry_after_ms` where the answer has it."
    )


class BrokerStarting(BusyError):
    """The process is not ready yet."""

    code = 4001
    advice = "The broker recovers its store: try again in a moment; its readiness probe says when."


class BrokerDraining(BusyError):
    """The process is stopping and takes nothing new."""

    code = 4002
    retry = Retry.AFTER_ROUTE
    advice = (
        "The broker stops in order: use another broker group of the topic, or wait until it is "
        "back."
    )


class Shortage(BusyError):
    """The store lacks something for now; nothing was changed."""

    status = "RESOURCE_EXHAUSTED"


class DiskFull(Shortage):
    """The volume has no room; nothing was changed."""

    code = 4003
    advice = (
        "Free space on the broker's volume or shorten retention. A running broker still serves "
        "reads, and writes again by itself; start a broker again that could not start."
    )


class BatchOutOfOrder(BusyError):
    """A batch in order came behind one that was refused; nothing was stored."""

    code = 4013
    status = "ABORTED"
    advice = (
        "Send the refused batch again, and after it everything that was sent behind it, in order: "
        "the SDK does so."
    )


class OffsetNotAvailable(BusyError):
    """The writer cannot say yet where a queue ends: it does not show all that was acknowledged."""

    code = 4014
    advice = (
        "Ask again after a moment: after a fail-over or a pause a writer first waits for its disk, "
        "its followers and its lease. If it stays so, see cometmq cluster status."
    )


class DescriptorsExhausted(Shortage):
    """No file can be opened: the process has as many open as it may; nothing was changed."""

    code = 4011
    advice = (
        "Raise the limit (ulimit -n, LimitNOFILE, the container runtime's), or stop the client "
        "that opens connections and never closes them; the process recovers by itself."
    )


class LimitExceeded(BusyError):
    """A limit of the server is reached; the message names it."""

    code = 4004
    status = "RESOURCE_EXHAUSTED"
    retry = Retry.NEVER
    advice = (
        "The named limit protects the server: use fewer, or raise the option that the message "
        "names."
    )


class AnswersUnread(BusyError):
    """Too many answers wait for clients that do not read them; nothing was begun."""

    code = 4012
    status = "RESOURCE_EXHAUSTED"
    advice = (
        "Read the answers of earlier calls, or make fewer at a time, then try again; where clients "
        "on slow networks need more at once, raise the unread_… options."
    )


class PeerUnavailable(BusyError):
    """The other process cannot be reached or did not answer in time."""

    code = 4005
    retry = Retry.AFTER_ROUTE
    advice = "The other side does not answer: check the address and that the process lives."


class PeerUnproven(BusyError):
    """The other process did not prove that it knows the cluster's secret, so it is not called."""

    code = 4020
    retry = Retry.AFTER_ROUTE
    advice = (
        "Give both processes the same secret (option internal_secret_file), and the same release. "
        "If the address is none of yours, find out which process has registered it."
    )


class SendTimeout(BusyError):
    """No broker has acknowledged a message within its delivery time."""

    code = 4006
    status = "DEADLINE_EXCEEDED"
    retry = Retry.NEVER
    advice = (
        "The message may or may not have been stored: send it again if a duplicate does no harm."
    )
    may_be_stored = True  # False: it is certainly not stored

    @classmethod
    def not_stored(cls, message: str) -> Self:
        """The error of a message that is certainly not stored."""
        error = cls(message).advising(
            "The message is not stored. Remove what its last refusal names, if it had one, then "
            "send it again."
        )
        error.may_be_stored = False
        return error


class RequestTimeout(BusyError):
    """No reply to a request came within its time."""

    code = 4060
    status = "DEADLINE_EXCEEDED"
    retry = Retry.NEVER
    advice = (
        "The request may have been done: send it again if that does no harm. Give it more time, or "
        "look at the lag of the group that replies."
    )


class TooManyRequests(BusyError):
    """As many requests wait for their replies as one producer may have."""

    code = 4061
    status = "RESOURCE_EXHAUSTED"
    advice = "Wait for replies, or for their time to be over, before you send more requests."


class ClientGone(BusyError):
    """The client's stream ended before it had answered."""

    code = 4070
    advice = (
        "If the client lives, it connects again within seconds: ask again. A message that its "
        "listener was to consume may have been consumed."
    )


class QuestionTimeout(BusyError):
    """The client did not answer in time."""

    code = 4071
    status = "DEADLINE_EXCEEDED"
    retry = Retry.NEVER
    advice = (
        "Give it more time (--timeout). A client that answers nothing at all has a blocked event "
        "loop: after its consume timeout its log has the stack."
    )


class TooManyQuestions(BusyError):
    """As many questions wait for answers as a client, or a broker, may have."""

    code = 4072
    status = "RESOURCE_EXHAUSTED"
    advice = "Wait for the answers, or for their time to be over, before you ask more."


class OffsetStoreFailed(BusyError):
    """The application's offset store raised an exception."""

    code = 4030
    advice = (
        "Look at the store and at its methods; the consumer asks again, and messages that were "
        "done are redelivered only if the process ends before."
    )


class ClientClosed(ConflictError):
    """The client object is not open."""

    code = 4007
    advice = "Use the client inside its `async with` block, or `with` of cometmq.client.sync."


class ClientForked(ConflictError):
    """The process was forked since: the client, or gRPC, is its parent's."""

    code = 4015
    advice = (
        "Make and open the client in the process that uses it, and close all others before the "
        "fork, or start the process by spawn or forkserver (docs/how-to/workers.md)."
    )


class ClientLoopMismatch(ConflictError):
    """The client belongs to another event loop."""

    code = 4016
    advice = (
        "Use the client in the event loop that opened it; the clients of cometmq.client.sync may "
        "be called by any thread."
    )


class ProcessFailed(BusyError):
    """A process that was started ended before it was ready."""

    code = 4008
    retry = Retry.NEVER
    advice = "Read the end of its log above, correct what it names, and start again."


class SlaveNotAvailable(BusyError):
    """Fewer members are in sync than the broker group asks for; nothing was stored."""

    code = 4010
    advice = (
        "Too few followers are in sync for topics that wait for replication, and for changes of "
        "topics and groups: bring followers back (cometmq cluster status), or lower "
        "min_in_sync_replicas; the broker then accepts sends again by itself."
    )


class LeaseUnavailable(BusyError):
    """The lease of a broker group cannot be read or written now."""

    code = 4009
    advice = (
        "Look at the lease's file or at the Kubernetes API and the member's rights there; the "
        "writer continues meanwhile."
    )


# --- 5000: the disk -----------------------------------------------------------------------------


class StoreLocked(StoreError):
    """The data folder is in use by another process."""

    code = 5000
    status = "FAILED_PRECONDITION"
    advice = "Another process uses this data folder: stop it, or give this one a folder of its own."


class StoreForeignFile(StoreError):
    """The data folder holds a file that does not belong there."""

    code = 5001
    status = "FAILED_PRECONDITION"
    advice = (
        "The message names the file and says what to do about it. Until that is done every start "
        "is refused, and changes nothing."
    )


class StoreDamaged(StoreError):
    """Stored bytes are not what was written."""

    code = 5002
    status = "DATA_LOSS"
    advice = (
        "Stop the member and copy its folder (store_path), then do what the message says. If it "
        "names no way, run cometmq store repair on the folder: it lists what is lost, and gives "
        "nothing up without an option."
    )


class StoreFailed(StoreError):
    """The operating system refused to read, write or sync."""

    code = 5003
    retry = Retry.AFTER_ROUTE
    advice = (
        "The disk refused to write or to sync; the broker stops, because what is on disk is "
        "unknown. Check the volume."
    )


class StoreForbidden(StoreError):
    """The data folder may not be written by the user that the process runs as."""

    code = 5005
    status = "FAILED_PRECONDITION"
    advice = (
        "Give all of the data folder to that user (chown -R; in Kubernetes fsGroup of the pod's "
        "securityContext), or run the process as the folder's owner."
    )


class StateTooNew(StoreError):
    """A state record is of a kind or version that this release does not know."""

    code = 5004
    status = "FAILED_PRECONDITION"
    advice = (
        "A newer CometMQ wrote this state: start that version or a later one; "
        "nothing has been changed."
    )


# --- 9000: ours ---------------------------------------------------------------------------------


class InternalError(CometError):
    """Something happened that must not happen."""

    code = 9000
    status = "INTERNAL"
    advice = "This is a fault in CometMQ: please report it with the server's log around this time."


class UnknownError(CometError):
    """The error's code is not in this release's catalogue."""

    code = 9001
    status = "UNKNOWN"
    advice = "The other side is of a newer release: update this one, and look the error up there."


def _leaves(base: type[CometError]) -> list[type[CometError]]:
    found = [base] if base.code else []
    for child in base.__subclasses__():
        found += _leaves(child)
    return found


CATALOGUE: dict[int, type[CometError]] = {
    e.code: e for e in sorted(_leaves(CometError), key=lambda e: e.code)
}
