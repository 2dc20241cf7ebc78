from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Lane(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_NONE: _ClassVar[Lane]
    STREAM: _ClassVar[Lane]
    NEWEST: _ClassVar[Lane]
    DATAGRAM: _ClassVar[Lane]

class Dtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_NONE: _ClassVar[Dtype]
    FLOAT32: _ClassVar[Dtype]
    FLOAT64: _ClassVar[Dtype]
    UINT8: _ClassVar[Dtype]

class Status(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ALIVE: _ClassVar[Status]
    SUSPECT: _ClassVar[Status]
    DEAD: _ClassVar[Status]
    LEFT: _ClassVar[Status]
LANE_NONE: Lane
STREAM: Lane
NEWEST: Lane
DATAGRAM: Lane
DTYPE_NONE: Dtype
FLOAT32: Dtype
FLOAT64: Dtype
UINT8: Dtype
ALIVE: Status
SUSPECT: Status
DEAD: Status
LEFT: Status

class Frame(_message.Message):
    __slots__ = ("version", "data", "sequence", "receipt_wanted", "receipt", "hello", "envelope", "more", "bye")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_WANTED_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENVELOPE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    BYE_FIELD_NUMBER: _ClassVar[int]
    version: int
    data: bytes
    sequence: int
    receipt_wanted: bool
    receipt: Receipt
    hello: Hello
    envelope: Envelope
    more: Lane
    bye: Bye
    def __init__(self, version: _Optional[int] = ..., data: _Optional[bytes] = ..., sequence: _Optional[int] = ..., receipt_wanted: bool = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., envelope: _Optional[_Union[Envelope, _Mapping]] = ..., more: _Optional[_Union[Lane, str]] = ..., bye: _Optional[_Union[Bye, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("swarm", "src", "dst", "incarnation", "first_sequence", "window_bytes", "task")
    SWARM_FIELD_NUMBER: _ClassVar[int]
    SRC_FIELD_NUMBER: _ClassVar[int]
    DST_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_BYTES_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    swarm: str
    src: str
    dst: str
    incarnation: int
    first_sequence: int
    window_bytes: int
    task: str
    def __init__(self, swarm: _Optional[str] = ..., src: _Optional[str] = ..., dst: _Optional[str] = ..., incarnation: _Optional[int] = ..., first_sequence: _Optional[int] = ..., window_bytes: _Optional[int] = ..., task: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("sequence", "stream_bytes", "newest_bytes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    STREAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NEWEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    stream_bytes: int
    newest_bytes: int
    def __init__(self, sequence: _Optional[int] = ..., stream_bytes: _Optional[int] = ..., newest_bytes: _Optional[int] = ...) -> None: ...

class Bye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("dtype", "size")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    dtype: Dtype
    size: int
    def __init__(self, dtype: _Optional[_Union[Dtype, str]] = ..., size: _Optional[int] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("lane", "data_bytes", "announce", "arrive", "call", "hold", "late", "refused", "newer_plan", "which_plan", "group_named", "part", "average", "ask", "fetch", "waiting", "gone", "accuse", "query", "answer", "stands", "state_wanted", "state_offer", "state_denied", "state_ask", "state_chunk", "attach", "grant", "renew", "detach", "detached", "push", "model", "ping", "ack", "ping_for", "vouch", "gossip", "summary", "listing", "want", "update", "global_model", "client_update", "state_request", "state_reply", "rival_ask", "elsewhere", "ready", "ring", "broken", "chunk", "rival_model", "pair_request", "pair_reply", "pair_refused", "rival_push", "push_taken")
    LANE_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    ARRIVE_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    HOLD_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    NEWER_PLAN_FIELD_NUMBER: _ClassVar[int]
    WHICH_PLAN_FIELD_NUMBER: _ClassVar[int]
    GROUP_NAMED_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    AVERAGE_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    ACCUSE_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    STANDS_FIELD_NUMBER: _ClassVar[int]
    STATE_WANTED_FIELD_NUMBER: _ClassVar[int]
    STATE_OFFER_FIELD_NUMBER: _ClassVar[int]
    STATE_DENIED_FIELD_NUMBER: _ClassVar[int]
    STATE_ASK_FIELD_NUMBER: _ClassVar[int]
    STATE_CHUNK_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    DETACHED_FIELD_NUMBER: _ClassVar[int]
    PUSH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    PING_FOR_FIELD_NUMBER: _ClassVar[int]
    VOUCH_FIELD_NUMBER: _ClassVar[int]
    GOSSIP_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    LISTING_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_UPDATE_FIELD_NUMBER: _ClassVar[int]
    STATE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    STATE_REPLY_FIELD_NUMBER: _ClassVar[int]
    RIVAL_ASK_FIELD_NUMBER: _ClassVar[int]
    ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RING_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    RIVAL_MODEL_FIELD_NUMBER: _ClassVar[int]
    PAIR_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PAIR_REPLY_FIELD_NUMBER: _ClassVar[int]
    PAIR_REFUSED_FIELD_NUMBER: _ClassVar[int]
    RIVAL_PUSH_FIELD_NUMBER: _ClassVar[int]
    PUSH_TAKEN_FIELD_NUMBER: _ClassVar[int]
    lane: Lane
    data_bytes: int
    announce: Announce
    arrive: Arrive
    call: Call
    hold: Hold
    late: Late
    refused: Refused
    newer_plan: NewerPlan
    which_plan: WhichPlan
    group_named: GroupNamed
    part: Part
    average: Average
    ask: Ask
    fetch: Fetch
    waiting: Waiting
    gone: Gone
    accuse: Accuse
    query: Query
    answer: Answer
    stands: Stands
    state_wanted: StateWanted
    state_offer: StateOffer
    state_denied: StateDenied
    state_ask: StateAsk
    state_chunk: StateChunk
    attach: Attach
    grant: Grant
    renew: Renew
    detach: Detach
    detached: Detached
    push: Push
    model: Model
    ping: Ping
    ack: Ack
    ping_for: PingFor
    vouch: Vouch
    gossip: Gossip
    summary: Summary
    listing: Listing
    want: Want
    update: Update
    global_model: Rival.GlobalModel
    client_update: Rival.ClientUpdate
    state_request: Rival.StateRequest
    state_reply: Rival.StateReply
    rival_ask: Rival.Ask
    elsewhere: Rival.Elsewhere
    ready: Rival.Ready
    ring: Rival.Ring
    broken: Rival.Broken
    chunk: Rival.Chunk
    rival_model: Rival.Model
    pair_request: Rival.PairRequest
    pair_reply: Rival.PairReply
    pair_refused: Rival.PairRefused
    rival_push: Rival.Push
    push_taken: Rival.PushTaken
    def __init__(self, lane: _Optional[_Union[Lane, str]] = ..., data_bytes: _Optional[int] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., arrive: _Optional[_Union[Arrive, _Mapping]] = ..., call: _Optional[_Union[Call, _Mapping]] = ..., hold: _Optional[_Union[Hold, _Mapping]] = ..., late: _Optional[_Union[Late, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., newer_plan: _Optional[_Union[NewerPlan, _Mapping]] = ..., which_plan: _Optional[_Union[WhichPlan, _Mapping]] = ..., group_named: _Optional[_Union[GroupNamed, _Mapping]] = ..., part: _Optional[_Union[Part, _Mapping]] = ..., average: _Optional[_Union[Average, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., waiting: _Optional[_Union[Waiting, _Mapping]] = ..., gone: _Optional[_Union[Gone, _Mapping]] = ..., accuse: _Optional[_Union[Accuse, _Mapping]] = ..., query: _Optional[_Union[Query, _Mapping]] = ..., answer: _Optional[_Union[Answer, _Mapping]] = ..., stands: _Optional[_Union[Stands, _Mapping]] = ..., state_wanted: _Optional[_Union[StateWanted, _Mapping]] = ..., state_offer: _Optional[_Union[StateOffer, _Mapping]] = ..., state_denied: _Optional[_Union[StateDenied, _Mapping]] = ..., state_ask: _Optional[_Union[StateAsk, _Mapping]] = ..., state_chunk: _Optional[_Union[StateChunk, _Mapping]] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ..., detached: _Optional[_Union[Detached, _Mapping]] = ..., push: _Optional[_Union[Push, _Mapping]] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., ping_for: _Optional[_Union[PingFor, _Mapping]] = ..., vouch: _Optional[_Union[Vouch, _Mapping]] = ..., gossip: _Optional[_Union[Gossip, _Mapping]] = ..., summary: _Optional[_Union[Summary, _Mapping]] = ..., listing: _Optional[_Union[Listing, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., update: _Optional[_Union[Update, _Mapping]] = ..., global_model: _Optional[_Union[Rival.GlobalModel, _Mapping]] = ..., client_update: _Optional[_Union[Rival.ClientUpdate, _Mapping]] = ..., state_request: _Optional[_Union[Rival.StateRequest, _Mapping]] = ..., state_reply: _Optional[_Union[Rival.StateReply, _Mapping]] = ..., rival_ask: _Optional[_Union[Rival.Ask, _Mapping]] = ..., elsewhere: _Optional[_Union[Rival.Elsewhere, _Mapping]] = ..., ready: _Optional[_Union[Rival.Ready, _Mapping]] = ..., ring: _Optional[_Union[Rival.Ring, _Mapping]] = ..., broken: _Optional[_Union[Rival.Broken, _Mapping]] = ..., chunk: _Optional[_Union[Rival.Chunk, _Mapping]] = ..., rival_model: _Optional[_Union[Rival.Model, _Mapping]] = ..., pair_request: _Optional[_Union[Rival.PairRequest, _Mapping]] = ..., pair_reply: _Optional[_Union[Rival.PairReply, _Mapping]] = ..., pair_refused: _Optional[_Union[Rival.PairRefused, _Mapping]] = ..., rival_push: _Optional[_Union[Rival.Push, _Mapping]] = ..., push_taken: _Optional[_Union[Rival.PushTaken, _Mapping]] = ...) -> None: ...

class PlanId(_message.Message):
    __slots__ = ("term", "coordinator")
    TERM_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    term: int
    coordinator: str
    def __init__(self, term: _Optional[int] = ..., coordinator: _Optional[str] = ...) -> None: ...

class GroupKey(_message.Message):
    __slots__ = ("plan", "round", "axis", "line")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    AXIS_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    plan: PlanId
    round: int
    axis: int
    line: int
    def __init__(self, plan: _Optional[_Union[PlanId, _Mapping]] = ..., round: _Optional[int] = ..., axis: _Optional[int] = ..., line: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("id", "radices", "holders", "from_round")
    ID_FIELD_NUMBER: _ClassVar[int]
    RADICES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    FROM_ROUND_FIELD_NUMBER: _ClassVar[int]
    id: PlanId
    radices: _containers.RepeatedScalarFieldContainer[int]
    holders: _containers.RepeatedScalarFieldContainer[str]
    from_round: int
    def __init__(self, id: _Optional[_Union[PlanId, _Mapping]] = ..., radices: _Optional[_Iterable[int]] = ..., holders: _Optional[_Iterable[str]] = ..., from_round: _Optional[int] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("key", "eta_s", "local_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ETA_S_FIELD_NUMBER: _ClassVar[int]
    LOCAL_S_FIELD_NUMBER: _ClassVar[int]
    key: GroupKey
    eta_s: float
    local_s: float
    def __init__(self, key: _Optional[_Union[GroupKey, _Mapping]] = ..., eta_s: _Optional[float] = ..., local_s: _Optional[float] = ...) -> None: ...

class Arrive(_message.Message):
    __slots__ = ("key", "weight", "dim", "schema", "incarnation", "sweep", "local_s", "compression")
    KEY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    LOCAL_S_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    key: GroupKey
    weight: float
    dim: int
    schema: bytes
    incarnation: int
    sweep: bool
    local_s: float
    compression: str
    def __init__(self, key: _Optional[_Union[GroupKey, _Mapping]] = ..., weight: _Optional[float] = ..., dim: _Optional[int] = ..., schema: _Optional[bytes] = ..., incarnation: _Optional[int] = ..., sweep: bool = ..., local_s: _Optional[float] = ..., compression: _Optional[str] = ...) -> None: ...

class Call(_message.Message):
    __slots__ = ("key", "sweep")
    KEY_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    key: GroupKey
    sweep: bool
    def __init__(self, key: _Optional[_Union[GroupKey, _Mapping]] = ..., sweep: bool = ...) -> None: ...

class Hold(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: GroupKey
    def __init__(self, key: _Optional[_Union[GroupKey, _Mapping]] = ...) -> None: ...

class Late(_message.Message):
    __slots__ = ("key", "round")
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    key: GroupKey
    round: int
    def __init__(self, key: _Optional[_Union[GroupKey, _Mapping]] = ..., round: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("key", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: GroupKey
    reason: str
    def __init__(self, key: _Optional[_Union[GroupKey, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class NewerPlan(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ...) -> None: ...

class WhichPlan(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GroupId(_message.Message):
    __slots__ = ("key", "leader", "incarnation")
    KEY_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    key: GroupKey
    leader: str
    incarnation: int
    def __init__(self, key: _Optional[_Union[GroupKey, _Mapping]] = ..., leader: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Version(_message.Message):
    __slots__ = ("counter", "rank")
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    counter: int
    rank: int
    def __init__(self, counter: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("peer", "weight", "num_cells", "incarnation")
    PEER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    NUM_CELLS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    peer: str
    weight: float
    num_cells: int
    incarnation: int
    def __init__(self, peer: _Optional[str] = ..., weight: _Optional[float] = ..., num_cells: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Share(_message.Message):
    __slots__ = ("begin", "end", "reducer")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    REDUCER_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    reducer: str
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ..., reducer: _Optional[str] = ...) -> None: ...

class GroupNamed(_message.Message):
    __slots__ = ("group", "version", "members", "shares", "ranks", "dim", "part_elems", "stall_s", "sweep", "compression")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    PART_ELEMS_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    SWEEP_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    version: Version
    members: _containers.RepeatedCompositeFieldContainer[Member]
    shares: _containers.RepeatedCompositeFieldContainer[Share]
    ranks: _containers.RepeatedScalarFieldContainer[str]
    dim: int
    part_elems: int
    stall_s: float
    sweep: bool
    compression: str
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ..., shares: _Optional[_Iterable[_Union[Share, _Mapping]]] = ..., ranks: _Optional[_Iterable[str]] = ..., dim: _Optional[int] = ..., part_elems: _Optional[int] = ..., stall_s: _Optional[float] = ..., sweep: bool = ..., compression: _Optional[str] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("group", "offset", "data")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    offset: int
    data: Array
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class Average(_message.Message):
    __slots__ = ("group", "version", "offset", "data")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    version: Version
    offset: int
    data: Array
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., offset: _Optional[int] = ..., data: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("group", "version", "offset")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    version: Version
    offset: int
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("group", "version", "offset")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    version: Version
    offset: int
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., offset: _Optional[int] = ...) -> None: ...

class Waiting(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ...) -> None: ...

class Gone(_message.Message):
    __slots__ = ("group", "finished")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    finished: bool
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ..., finished: bool = ...) -> None: ...

class Accuse(_message.Message):
    __slots__ = ("group", "peer", "reason")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    peer: str
    reason: str
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ..., peer: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Query(_message.Message):
    __slots__ = ("group", "ballot")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    ballot: Version
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ..., ballot: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class Answer(_message.Message):
    __slots__ = ("group", "ballot")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    group: GroupId
    ballot: Version
    def __init__(self, group: _Optional[_Union[GroupId, _Mapping]] = ..., ballot: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...

class Stands(_message.Message):
    __slots__ = ("named", "holder")
    NAMED_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    named: GroupNamed
    holder: str
    def __init__(self, named: _Optional[_Union[GroupNamed, _Mapping]] = ..., holder: _Optional[str] = ...) -> None: ...

class StateWanted(_message.Message):
    __slots__ = ("dim", "schema", "least_round")
    DIM_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    LEAST_ROUND_FIELD_NUMBER: _ClassVar[int]
    dim: int
    schema: bytes
    least_round: int
    def __init__(self, dim: _Optional[int] = ..., schema: _Optional[bytes] = ..., least_round: _Optional[int] = ...) -> None: ...

class StateOffer(_message.Message):
    __slots__ = ("serial", "round")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    serial: int
    round: int
    def __init__(self, serial: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class StateDenied(_message.Message):
    __slots__ = ("reason", "again")
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    reason: str
    again: bool
    def __init__(self, reason: _Optional[str] = ..., again: bool = ...) -> None: ...

class StateAsk(_message.Message):
    __slots__ = ("serial", "offset", "size")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    serial: int
    offset: int
    size: int
    def __init__(self, serial: _Optional[int] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("serial", "offset", "data")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    serial: int
    offset: int
    data: Array
    def __init__(self, serial: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...

class Label(_message.Message):
    __slots__ = ("term", "root", "beat")
    TERM_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    term: int
    root: str
    beat: int
    def __init__(self, term: _Optional[int] = ..., root: _Optional[str] = ..., beat: _Optional[int] = ...) -> None: ...

class EdgeId(_message.Message):
    __slots__ = ("incarnation", "epoch")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    epoch: int
    def __init__(self, incarnation: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class Subtree(_message.Message):
    __slots__ = ("peers", "contributors", "weight", "seen", "period_s")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    peers: int
    contributors: int
    weight: float
    seen: int
    period_s: float
    def __init__(self, peers: _Optional[int] = ..., contributors: _Optional[int] = ..., weight: _Optional[float] = ..., seen: _Optional[int] = ..., period_s: _Optional[float] = ...) -> None: ...

class RootClaim(_message.Message):
    __slots__ = ("term", "live", "examples")
    TERM_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    term: int
    live: int
    examples: float
    def __init__(self, term: _Optional[int] = ..., live: _Optional[int] = ..., examples: _Optional[float] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("edge", "label", "step", "dim", "schema", "insist")
    EDGE_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    SCHEMA_FIELD_NUMBER: _ClassVar[int]
    INSIST_FIELD_NUMBER: _ClassVar[int]
    edge: EdgeId
    label: Label
    step: int
    dim: int
    schema: bytes
    insist: bool
    def __init__(self, edge: _Optional[_Union[EdgeId, _Mapping]] = ..., label: _Optional[_Union[Label, _Mapping]] = ..., step: _Optional[int] = ..., dim: _Optional[int] = ..., schema: _Optional[bytes] = ..., insist: bool = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("edge", "incarnation", "clock_s", "label", "path", "have", "answer")
    EDGE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    edge: EdgeId
    incarnation: int
    clock_s: float
    label: Label
    path: _containers.RepeatedScalarFieldContainer[str]
    have: int
    answer: bool
    def __init__(self, edge: _Optional[_Union[EdgeId, _Mapping]] = ..., incarnation: _Optional[int] = ..., clock_s: _Optional[float] = ..., label: _Optional[_Union[Label, _Mapping]] = ..., path: _Optional[_Iterable[str]] = ..., have: _Optional[int] = ..., answer: bool = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("edge", "echo_s", "have", "answer")
    EDGE_FIELD_NUMBER: _ClassVar[int]
    ECHO_S_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    ANSWER_FIELD_NUMBER: _ClassVar[int]
    edge: EdgeId
    echo_s: float
    have: int
    answer: bool
    def __init__(self, edge: _Optional[_Union[EdgeId, _Mapping]] = ..., echo_s: _Optional[float] = ..., have: _Optional[int] = ..., answer: bool = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ("edge",)
    EDGE_FIELD_NUMBER: _ClassVar[int]
    edge: EdgeId
    def __init__(self, edge: _Optional[_Union[EdgeId, _Mapping]] = ...) -> None: ...

class Detached(_message.Message):
    __slots__ = ("edge", "reason", "instead")
    EDGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    INSTEAD_FIELD_NUMBER: _ClassVar[int]
    edge: EdgeId
    reason: str
    instead: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, edge: _Optional[_Union[EdgeId, _Mapping]] = ..., reason: _Optional[str] = ..., instead: _Optional[_Iterable[str]] = ...) -> None: ...

class Push(_message.Message):
    __slots__ = ("edge", "counter", "rho", "echo_s", "subtree")
    EDGE_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    RHO_FIELD_NUMBER: _ClassVar[int]
    ECHO_S_FIELD_NUMBER: _ClassVar[int]
    SUBTREE_FIELD_NUMBER: _ClassVar[int]
    edge: EdgeId
    counter: int
    rho: Array
    echo_s: float
    subtree: Subtree
    def __init__(self, edge: _Optional[_Union[EdgeId, _Mapping]] = ..., counter: _Optional[int] = ..., rho: _Optional[_Union[Array, _Mapping]] = ..., echo_s: _Optional[float] = ..., subtree: _Optional[_Union[Subtree, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("incarnation", "counter", "v", "edge", "clock_s", "label", "path", "step", "period_s", "contributors", "scale", "direction", "taken")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    EDGE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_S_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PERIOD_S_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    DIRECTION_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    counter: int
    v: Array
    edge: EdgeId
    clock_s: float
    label: Label
    path: _containers.RepeatedScalarFieldContainer[str]
    step: int
    period_s: float
    contributors: int
    scale: float
    direction: Array
    taken: int
    def __init__(self, incarnation: _Optional[int] = ..., counter: _Optional[int] = ..., v: _Optional[_Union[Array, _Mapping]] = ..., edge: _Optional[_Union[EdgeId, _Mapping]] = ..., clock_s: _Optional[float] = ..., label: _Optional[_Union[Label, _Mapping]] = ..., path: _Optional[_Iterable[str]] = ..., step: _Optional[int] = ..., period_s: _Optional[float] = ..., contributors: _Optional[int] = ..., scale: _Optional[float] = ..., direction: _Optional[_Union[Array, _Mapping]] = ..., taken: _Optional[int] = ...) -> None: ...

class PeerInfo(_message.Message):
    __slots__ = ("peer", "incarnation", "speed", "uplink_bytes_per_s", "downlink_bytes_per_s", "dialable")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    UPLINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DIALABLE_FIELD_NUMBER: _ClassVar[int]
    peer: str
    incarnation: int
    speed: float
    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    dialable: bool
    def __init__(self, peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., speed: _Optional[float] = ..., uplink_bytes_per_s: _Optional[float] = ..., downlink_bytes_per_s: _Optional[float] = ..., dialable: bool = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("info", "address", "version", "birth", "status")
    INFO_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BIRTH_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    info: PeerInfo
    address: str
    version: int
    birth: int
    status: Status
    def __init__(self, info: _Optional[_Union[PeerInfo, _Mapping]] = ..., address: _Optional[str] = ..., version: _Optional[int] = ..., birth: _Optional[int] = ..., status: _Optional[_Union[Status, str]] = ...) -> None: ...

class Scalar(_message.Message):
    __slots__ = ("integer", "text")
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    integer: int
    text: str
    def __init__(self, integer: _Optional[int] = ..., text: _Optional[str] = ...) -> None: ...

class Record(_message.Message):
    __slots__ = ("key", "rank", "plan", "root_claim", "text")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ROOT_CLAIM_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    key: _containers.RepeatedScalarFieldContainer[str]
    rank: _containers.RepeatedCompositeFieldContainer[Scalar]
    plan: Plan
    root_claim: RootClaim
    text: str
    def __init__(self, key: _Optional[_Iterable[str]] = ..., rank: _Optional[_Iterable[_Union[Scalar, _Mapping]]] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., root_claim: _Optional[_Union[RootClaim, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class RecordName(_message.Message):
    __slots__ = ("key", "rank")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    key: _containers.RepeatedScalarFieldContainer[str]
    rank: _containers.RepeatedCompositeFieldContainer[Scalar]
    def __init__(self, key: _Optional[_Iterable[str]] = ..., rank: _Optional[_Iterable[_Union[Scalar, _Mapping]]] = ...) -> None: ...

class LifeName(_message.Message):
    __slots__ = ("peer", "incarnation", "version")
    PEER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    peer: str
    incarnation: int
    version: int
    def __init__(self, peer: _Optional[str] = ..., incarnation: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class News(_message.Message):
    __slots__ = ("claims", "names", "digest")
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    claims: _containers.RepeatedCompositeFieldContainer[Claim]
    names: _containers.RepeatedCompositeFieldContainer[RecordName]
    digest: int
    def __init__(self, claims: _Optional[_Iterable[_Union[Claim, _Mapping]]] = ..., names: _Optional[_Iterable[_Union[RecordName, _Mapping]]] = ..., digest: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("news", "behalf")
    NEWS_FIELD_NUMBER: _ClassVar[int]
    BEHALF_FIELD_NUMBER: _ClassVar[int]
    news: News
    behalf: str
    def __init__(self, news: _Optional[_Union[News, _Mapping]] = ..., behalf: _Optional[str] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("news", "behalf")
    NEWS_FIELD_NUMBER: _ClassVar[int]
    BEHALF_FIELD_NUMBER: _ClassVar[int]
    news: News
    behalf: str
    def __init__(self, news: _Optional[_Union[News, _Mapping]] = ..., behalf: _Optional[str] = ...) -> None: ...

class PingFor(_message.Message):
    __slots__ = ("target", "news")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    target: str
    news: News
    def __init__(self, target: _Optional[str] = ..., news: _Optional[_Union[News, _Mapping]] = ...) -> None: ...

class Vouch(_message.Message):
    __slots__ = ("target",)
    TARGET_FIELD_NUMBER: _ClassVar[int]
    target: str
    def __init__(self, target: _Optional[str] = ...) -> None: ...

class Gossip(_message.Message):
    __slots__ = ("news",)
    NEWS_FIELD_NUMBER: _ClassVar[int]
    news: News
    def __init__(self, news: _Optional[_Union[News, _Mapping]] = ...) -> None: ...

class Summary(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, digests: _Optional[_Iterable[int]] = ...) -> None: ...

class Listing(_message.Message):
    __slots__ = ("buckets", "lives", "names")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    LIVES_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    lives: _containers.RepeatedCompositeFieldContainer[LifeName]
    names: _containers.RepeatedCompositeFieldContainer[RecordName]
    def __init__(self, buckets: _Optional[_Iterable[int]] = ..., lives: _Optional[_Iterable[_Union[LifeName, _Mapping]]] = ..., names: _Optional[_Iterable[_Union[RecordName, _Mapping]]] = ...) -> None: ...

class Words(_message.Message):
    __slots__ = ("words",)
    WORDS_FIELD_NUMBER: _ClassVar[int]
    words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, words: _Optional[_Iterable[str]] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("peers", "keys")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedScalarFieldContainer[str]
    keys: _containers.RepeatedCompositeFieldContainer[Words]
    def __init__(self, peers: _Optional[_Iterable[str]] = ..., keys: _Optional[_Iterable[_Union[Words, _Mapping]]] = ...) -> None: ...

class Update(_message.Message):
    __slots__ = ("claims", "records")
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    claims: _containers.RepeatedCompositeFieldContainer[Claim]
    records: _containers.RepeatedCompositeFieldContainer[Record]
    def __init__(self, claims: _Optional[_Iterable[_Union[Claim, _Mapping]]] = ..., records: _Optional[_Iterable[_Union[Record, _Mapping]]] = ...) -> None: ...

class Rival(_message.Message):
    __slots__ = ()
    class GlobalModel(_message.Message):
        __slots__ = ("round", "params", "schema", "final", "contributors", "weight")
        ROUND_FIELD_NUMBER: _ClassVar[int]
        PARAMS_FIELD_NUMBER: _ClassVar[int]
        SCHEMA_FIELD_NUMBER: _ClassVar[int]
        FINAL_FIELD_NUMBER: _ClassVar[int]
        CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
        WEIGHT_FIELD_NUMBER: _ClassVar[int]
        round: int
        params: Array
        schema: bytes
        final: bool
        contributors: int
        weight: float
        def __init__(self, round: _Optional[int] = ..., params: _Optional[_Union[Array, _Mapping]] = ..., schema: _Optional[bytes] = ..., final: bool = ..., contributors: _Optional[int] = ..., weight: _Optional[float] = ...) -> None: ...
    class ClientUpdate(_message.Message):
        __slots__ = ("round", "params", "num_examples", "schema")
        ROUND_FIELD_NUMBER: _ClassVar[int]
        PARAMS_FIELD_NUMBER: _ClassVar[int]
        NUM_EXAMPLES_FIELD_NUMBER: _ClassVar[int]
        SCHEMA_FIELD_NUMBER: _ClassVar[int]
        round: int
        params: Array
        num_examples: float
        schema: bytes
        def __init__(self, round: _Optional[int] = ..., params: _Optional[_Union[Array, _Mapping]] = ..., num_examples: _Optional[float] = ..., schema: _Optional[bytes] = ...) -> None: ...
    class StateRequest(_message.Message):
        __slots__ = ()
        def __init__(self) -> None: ...
    class StateReply(_message.Message):
        __slots__ = ("round", "params", "schema")
        ROUND_FIELD_NUMBER: _ClassVar[int]
        PARAMS_FIELD_NUMBER: _ClassVar[int]
        SCHEMA_FIELD_NUMBER: _ClassVar[int]
        round: int
        params: Array
        schema: bytes
        def __init__(self, round: _Optional[int] = ..., params: _Optional[_Union[Array, _Mapping]] = ..., schema: _Optional[bytes] = ...) -> None: ...
    class Ask(_message.Message):
        __slots__ = ("round",)
        ROUND_FIELD_NUMBER: _ClassVar[int]
        round: int
        def __init__(self, round: _Optional[int] = ...) -> None: ...
    class Elsewhere(_message.Message):
        __slots__ = ("round", "own_round")
        ROUND_FIELD_NUMBER: _ClassVar[int]
        OWN_ROUND_FIELD_NUMBER: _ClassVar[int]
        round: int
        own_round: int
        def __init__(self, round: _Optional[int] = ..., own_round: _Optional[int] = ...) -> None: ...
    class Ready(_message.Message):
        __slots__ = ("round", "weight", "dim", "schema")
        ROUND_FIELD_NUMBER: _ClassVar[int]
        WEIGHT_FIELD_NUMBER: _ClassVar[int]
        DIM_FIELD_NUMBER: _ClassVar[int]
        SCHEMA_FIELD_NUMBER: _ClassVar[int]
        round: int
        weight: float
        dim: int
        schema: bytes
        def __init__(self, round: _Optional[int] = ..., weight: _Optional[float] = ..., dim: _Optional[int] = ..., schema: _Optional[bytes] = ...) -> None: ...
    class Ring(_message.Message):
        __slots__ = ("round", "attempt", "coordinator", "members", "weights")
        ROUND_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        COORDINATOR_FIELD_NUMBER: _ClassVar[int]
        MEMBERS_FIELD_NUMBER: _ClassVar[int]
        WEIGHTS_FIELD_NUMBER: _ClassVar[int]
        round: int
        attempt: int
        coordinator: str
        members: _containers.RepeatedScalarFieldContainer[str]
        weights: _containers.RepeatedScalarFieldContainer[float]
        def __init__(self, round: _Optional[int] = ..., attempt: _Optional[int] = ..., coordinator: _Optional[str] = ..., members: _Optional[_Iterable[str]] = ..., weights: _Optional[_Iterable[float]] = ...) -> None: ...
    class Broken(_message.Message):
        __slots__ = ("round", "attempt", "peer", "reason")
        ROUND_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        PEER_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        round: int
        attempt: int
        peer: str
        reason: str
        def __init__(self, round: _Optional[int] = ..., attempt: _Optional[int] = ..., peer: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
    class Chunk(_message.Message):
        __slots__ = ("round", "attempt", "coordinator", "step", "data")
        ROUND_FIELD_NUMBER: _ClassVar[int]
        ATTEMPT_FIELD_NUMBER: _ClassVar[int]
        COORDINATOR_FIELD_NUMBER: _ClassVar[int]
        STEP_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        round: int
        attempt: int
        coordinator: str
        step: int
        data: Array
        def __init__(self, round: _Optional[int] = ..., attempt: _Optional[int] = ..., coordinator: _Optional[str] = ..., step: _Optional[int] = ..., data: _Optional[_Union[Array, _Mapping]] = ...) -> None: ...
    class Model(_message.Message):
        __slots__ = ("round", "params", "weight", "degree", "schema")
        ROUND_FIELD_NUMBER: _ClassVar[int]
        PARAMS_FIELD_NUMBER: _ClassVar[int]
        WEIGHT_FIELD_NUMBER: _ClassVar[int]
        DEGREE_FIELD_NUMBER: _ClassVar[int]
        SCHEMA_FIELD_NUMBER: _ClassVar[int]
        round: int
        params: Array
        weight: float
        degree: int
        schema: bytes
        def __init__(self, round: _Optional[int] = ..., params: _Optional[_Union[Array, _Mapping]] = ..., weight: _Optional[float] = ..., degree: _Optional[int] = ..., schema: _Optional[bytes] = ...) -> None: ...
    class PairRequest(_message.Message):
        __slots__ = ("serial", "params", "weight", "schema")
        SERIAL_FIELD_NUMBER: _ClassVar[int]
        PARAMS_FIELD_NUMBER: _ClassVar[int]
        WEIGHT_FIELD_NUMBER: _ClassVar[int]
        SCHEMA_FIELD_NUMBER: _ClassVar[int]
        serial: int
        params: Array
        weight: float
        schema: bytes
        def __init__(self, serial: _Optional[int] = ..., params: _Optional[_Union[Array, _Mapping]] = ..., weight: _Optional[float] = ..., schema: _Optional[bytes] = ...) -> None: ...
    class PairReply(_message.Message):
        __slots__ = ("serial", "params", "weight", "schema")
        SERIAL_FIELD_NUMBER: _ClassVar[int]
        PARAMS_FIELD_NUMBER: _ClassVar[int]
        WEIGHT_FIELD_NUMBER: _ClassVar[int]
        SCHEMA_FIELD_NUMBER: _ClassVar[int]
        serial: int
        params: Array
        weight: float
        schema: bytes
        def __init__(self, serial: _Optional[int] = ..., params: _Optional[_Union[Array, _Mapping]] = ..., weight: _Optional[float] = ..., schema: _Optional[bytes] = ...) -> None: ...
    class PairRefused(_message.Message):
        __slots__ = ("serial", "reason")
        SERIAL_FIELD_NUMBER: _ClassVar[int]
        REASON_FIELD_NUMBER: _ClassVar[int]
        serial: int
        reason: str
        def __init__(self, serial: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...
    class Push(_message.Message):
        __slots__ = ("round", "params", "weight", "schema")
        ROUND_FIELD_NUMBER: _ClassVar[int]
        PARAMS_FIELD_NUMBER: _ClassVar[int]
        WEIGHT_FIELD_NUMBER: _ClassVar[int]
        SCHEMA_FIELD_NUMBER: _ClassVar[int]
        round: int
        params: Array
        weight: float
        schema: bytes
        def __init__(self, round: _Optional[int] = ..., params: _Optional[_Union[Array, _Mapping]] = ..., weight: _Optional[float] = ..., schema: _Optional[bytes] = ...) -> None: ...
    class PushTaken(_message.Message):
        __slots__ = ("round",)
        ROUND_FIELD_NUMBER: _ClassVar[int]
        round: int
        def __init__(self, round: _Optional[int] = ...) -> None: ...
    def __init__(self) -> None: ...
