@0xd1a7c3b59e20f46b;
# The wire between an innet-replay server and its clients, protocol version 1.
#
# A connection carries frames in both directions. A frame is
#
#   control length   u32, little endian, in bytes, a multiple of 8
#   payload length   u32, little endian, in bytes
#   control          one Cap'n Proto message (unpacked, with its segment table):
#                    a Request from the client, a Reply from the server
#   payload          raw bytes, laid out as the control message says
#
# Both lengths are checked against the receiver's limits before anything is allocated.
# Every integer and float in a payload is little endian.
#
# A connection starts with Request.hello. The server answers with Reply.challenge, the client
# sends Request.authenticate, and the server answers with Reply.welcome; any other request
# before the welcome ends the connection. Until the welcome a frame has at most 64 KiB in either
# direction.
#
# A proof is HMAC-SHA256(token, side + client nonce + server nonce + channel binding), in which
#
#   side              "innet client" or "innet server": the end that proves
#   channel binding   over TLS, which is 1.3, 32 bytes of exported keying material with the label
#                     "EXPORTER-Channel-Binding" and an empty context (RFC 9266); without TLS, nothing
#
# The client proves first. A server has a token for each role that it serves, and the token that the
# client's proof fits is the connection's role: a request that the role does not allow is answered
# with the error `forbidden`. The server's proof is made with the same token. Later requests may be pipelined: each carries an id,
# and its reply carries the same id. Replies may come in another order than the requests.
#
# Chunk: consecutive steps of one stream, in a payload as
#
#   rows    `rows` times a row of fixed size; a row is
#             flags      u8: 1 first, 2 terminated, 4 truncated, 8 final row, 16 difference,
#                        32 reference (in replies alone)
#             columns    each column of fixed shape whose codec is `none`, in the table's order, raw
#             lengths    u32 for each other column, in the table's order: the length of its
#                        blob, plus 2^31 where that is a difference
#             counts     u32 for each ragged column, whose shape begins with 0, in the table's
#                        order: the elements of its value along this dimension
#   blobs   row after row, column after column: the blobs of the other columns. A blob as long
#           as the raw value is the raw value; a longer one is refused. A shorter one, unless
#           it is a difference, is packed by the column's codec. The blob of a ragged column is
#           empty where its count is 0, and never a difference:
#             lz4        an LZ4 block, without a length prefix
#             zstd       a zstd frame, without a dictionary
#
# A row without flag 16 is a key row, as the first row of each chunk is. Blobs of a row with flag 16
# may be differences to the column's value in the newest key row before it. A difference is runs of
#
#   skip    LEB128, up to 4 bytes: bytes that are as in the key row, from the end of the last run
#   count   LEB128, up to 4 bytes: bytes that are not
#   bytes   `count` bytes
#
# and the bytes after the last run are as in the key row; it may be empty, and is no longer than
# the raw column.
#
# The window of a sampled item is its rows, in order, in the same row layout, followed
# (after the rows of all items) by their blobs in the same order. Before rows of a chunk whose key
# row the window does not have, the reply has that key row with flag 32 set: it is no row of the
# window, but its blobs are among the blobs.

struct Request {
  id @0 :UInt64;
  deadlineMs @1 :UInt32;
  # How long the server may let the request wait, in milliseconds; 0 is one try without waiting.

  table @22 :UInt16;
  # The table that the request is about, in the numbers of its connection: 1, 2, 3, ... in the order of their first mention.
  # 0 is none. Requests that make, describe, empty or drop a table have its name instead.
  tableName @23 :Text;
  # The table's name, in the connection's first request about it alone. The number stays this table's: once the table was
  # dropped, the answer is the error `unknownTable`, also if another one has its name. A client then names the table
  # again, or connects again, as it does for more than 4,096 tables.

  union {
    hello @2 :Hello;
    authenticate @3 :Data;
    # the client's proof; empty without a token
    createTable @4 :Text;
    # The table's definition in JSON, see TableDefinition below.
    describeTable @5 :Text;
    emptyTable @6 :Text;
    dropTable @7 :Text;
    openWriter @8 :OpenWriter;
    push @9 :Push;
    sample @10 :Sample;
    updatePriorities @11 :UpdatePriorities;
    reportCorrupt @12 :ReportCorrupt;
    putParameters @13 :PutParameters;
    getParameters @14 :GetParameters;
    stats @15 :Void;
    closeWriter @16 :CloseWriter;
    callExtension @17 :Extension;
    # To a service beside the memory; the payload is its message, of at most 16 KiB.
    list @18 :Void;
    # Lists tables and parameters.
    snapshot @19 :Void;
    # Saves the server's memory in the folder of its configuration; the answer follows when the file is complete.
    readSteps @20 :ReadSteps;
    dropParameters @21 :Text;
    changeLease @24 :ChangeLease;
  }
}

struct Reply {
  id @0 :UInt64;
  union {
    error @1 :Error;
    challenge @2 :Challenge;
    welcome @3 :Data;
    # the server's proof; empty without a token
    done @4 :Void;
    # createTable, emptyTable, dropTable, dropParameters, closeWriter, snapshot, changeLease
    table @5 :Text;
    # describeTable: a TableDefinition
    writer @6 :WriterOpened;
    pushed @7 :Pushed;
    sampled @8 :Sampled;
    updated @9 :Updated;
    corrupt @10 :Text;
    # reportCorrupt: the name of the writer that pushed it, empty when the item is gone
    parameters @11 :Parameters;
    # the payload is the file; empty with version 0 when there is nothing newer
    stats @12 :Text;
    # one JSON object
    extension @13 :Extension;
    # callExtension: the payload is the service's answer
    listing @14 :Listing;
    # list
    waiting @15 :Text;
    # No answer yet, and the reason in JSON (`WaitReason` in crates/replay_core/src/error.rs). With a request's id, every five seconds while that request waits at the server. With
    # id 0, about every second while the server does not read the connection, because the answers to its earlier requests
    # or memory for its next frame are missing. A client may ignore it, or report it to its user; it shows the server a
    # client that is gone.
    stepsRead @16 :StepsRead;
  }
}

enum ErrorCode {
  internal @0;
  priority @1;
  noMass @2;
  unknownTable @3;
  tableDiffers @4;
  table @5;
  schema @6;
  tooLarge @7;
  deadline @8;
  view @9;
  fenced @10;
  expired @11;
  protocol @12;
  version @13;
  authentication @14;
  connect @15;
  disconnected @16;
  corrupt @17;
  config @18;
  parameters @19;
  closed @20;
  io @21;
  interrupted @22;
  extension @23;
  # A failure of the service that `callExtension` went to.
  forbidden @24;
  outOfMemory @25;
  lease @26;
}

struct Error {
  code @0 :ErrorCode;
  message @1 :Text;
  # empty with a reason
  waitedFor @2 :Text;
  # with `deadline`: what the request waited for, as `waiting` has it
}

struct Hello {
  protocol @0 :UInt32;
  release @1 :Text;
  # the client's version, for the error message
  nonce @2 :Data;
  # 32 random bytes
}

struct Challenge {
  protocol @0 :UInt32;
  release @1 :Text;
  incarnation @2 :UInt64;
  # random number of this start of the server: ids of another incarnation name nothing, except items that this one has restored
  nonce @3 :Data;
  # 32 random bytes
  tokenNeeded @4 :Bool;
  maxFrameBytes @5 :UInt64;
  # the server's limit on one frame
}

# TableDefinition: JSON of at most 128 KiB, with the names of a configuration file (`TableConfig` in crates/replay_core/src/schema.rs).
#
#   {"name": "steps",
#    "columns": [{"name": "observation", "dtype": "float32", "shape": [4], "codec": "none", "finite": true}],
#    "capacity": 1000, "capacity_bytes": 0, "sampler": "prioritized", "priority_exponent": 0.6,
#    "priority_unit_log2": -19, "live_max_priority": false, "max_times_sampled": 0, "min_size": 1,
#    "samples_per_insert": 0.0, "slack": 0.0, "queue_size": 0, "max_version_lag": 0, "view": {...}}
#
#   dtype                in NumPy's names
#   shape                of one value; with 0 in the first place the column is ragged: each value has a length of its own
#   max_length           the longest of these, in elements; 0, the default, sets no limit, and is left out
#   codec                none, lz4, zstd; without one, by the size of a value, and none for ragged columns
#   finite               writers refuse NaN and infinities where the column is the reward, or the observation of the writer's or the
#                        table's view; a server does not look into rows
#   sampler              prioritized, uniform, fifo, lifo, max_heap, min_heap, rank_based
#   live_max_priority    items without a priority take the largest of the live items, not the largest ever
#   queue_size           of a queue: items for which it has room; 0 is none
#   max_times_sampled, samples_per_insert, max_version_lag
#                        0 sets no limit. The last: versions by which the parameters of a writer may be behind while it pushes
#   parameters           name of the parameters whose versions chunks have; left out without
#   max_sample_lag       versions by which a sampled item may be behind the newest of these; left out without a limit
#   view                 of writers and samples that name none
#
# All but name, columns and capacity may be left out, and of a column all but name and dtype.

struct OpenWriter {
  # On the connection that the writer's pushes will come over: a push over one that has opened no writer ends
  # it. Pushes may have to wait, and the server holds the requests of such connections apart: open writers on
  # connections of their own, away from requests that must not wait behind pushes.
  writer @0 :UInt64;
  # random number of the client; the same number again fences the older connection off
  name @1 :Text;
  # display name in errors and logs
  streams @2 :UInt32;
  windowBefore @3 :UInt16;
  windowAfter @4 :UInt16;
  # the window of this writer's items, in steps around the anchor
  resume @5 :Bool;
  # this writer was opened before: a server that does not know it answers `expired`, where it would open it
  # anew, since pushes that it has applied may be sent again
}

struct WriterOpened {
  epoch @0 :UInt32;
  # rises with every connection of the same writer; pushes of an older epoch are refused
  lastSequence @1 :UInt64;
  # the last push that was applied; 0 when there was none
  steps @2 :UInt64;
  # steps the table has taken from this writer so far
  connected @3 :UInt64;
  # connected writers of the table, this one included
}

struct CloseWriter {
  writer @0 :UInt64;
  epoch @1 :UInt32;
}

struct Push {
  # The payload is the chunks' payloads, one after the other.
  writer @0 :UInt64;
  epoch @1 :UInt32;
  sequence @2 :UInt64;
  # 1, 2, 3, ...: a number that was applied before is answered and not applied again
  chunks @3 :List(Chunk);
  items @4 :List(Item);
}

struct Chunk {
  stream @0 :UInt32;
  rows @1 :UInt32;
  firstStep @2 :UInt64;
  # the stream's number of the first row; a gap ends every open window of the stream
  bytes @3 :UInt32;
  version @4 :UInt64;
  # of the parameters that the rows come from (`parameters` in TableDefinition); 0 is unknown
}

struct Item {
  anchor @0 :UInt64;
  # step number in the stream
  stream @1 :UInt32;
  before @2 :UInt16;
  after @3 :UInt16;
  # rows of the window that exist around the anchor: at most the writer's window
  priority @4 :Float32 = -1;
  # before the exponent; -1 is "as the current maximum"
}

struct Pushed {
  steps @0 :UInt64;
  # steps the table has taken from this writer so far
}

struct Sample {
  count @0 :UInt32;
  before @1 :UInt16;
  after @2 :UInt16;
  # rows wanted around each anchor; more than an item's window is an error
  allowShort @3 :Bool;
  minProbability @4 :Bool;
  # also report the smallest probability in the table: costs a scan of it
  share @5 :BatchShare;
  # null for a whole batch
  definition @6 :UInt32;
  # Checksum (CRC-32, never 0) of the columns and the view that the client decodes with: a table of another definition answers with
  # the error `tableDiffers`. 0 is any definition.
  leaseMs @7 :UInt32;
  # Not 0: the items stay in the table, and with this connection, until they are acknowledged, or it ends. They also return to where they
  # were so many milliseconds after the lease was begun; 2^32 - 1 is no end. Not for a share.
}

struct BatchShare {
  # One server's share of a batch that a client samples from several. It never waits: the reply has as many items as there are, up to
  # `count`, which may be 0, and the table's state. The client counts minSize over all servers.
  take @0 :UInt32;
  # samples to take from the rate limiter, as far as it admits them
}

struct Sampled {
  # The payload is rowBytes of rows, then the blobs.
  rowBytes @0 :UInt64;
  ids @1 :List(UInt64);
  probabilities @2 :List(Float64);
  ages @3 :List(UInt32);
  # steps inserted into the table since the item was
  timesSampled @4 :List(UInt32);
  before @5 :List(UInt16);
  after @6 :List(UInt16);
  # rows of each item around its anchor: one more than it was pushed with where its last row terminates, and the next one, if it is
  # a final row or does not start a stack, has come
  items @7 :UInt64;
  # live items with a priority above zero at the instant of sampling
  minProbability @8 :Float64;
  # 0 unless asked for
  state @9 :ShareState;
  # for a share of a batch
  versions @10 :List(UInt64);
  # the smallest version of each item's chunks, 0 is unknown; empty where all are
  lease @11 :UInt64;
  # a random number, 0 without a lease
}

struct ChangeLease {
  # Of a batch of the request's table, over any connection; the error is `lease` if it is over.
  lease @0 :UInt64;
  begin @1 :Bool;
  # The batch has reached its caller, and the time of its lease begins; else it is acknowledged.
}

struct ShareState {
  # A table as one share of a batch found it.
  number @0 :UInt16;
  # the upper 16 bits of the ids of its items, but of restored ones
  totalMass @1 :Float64;
  # sum of the priorities after the exponent
  items @2 :UInt64;
  # live items, with or without priority
  taken @3 :UInt32;
  # samples that this part has taken from the rate limiter
  allowance @4 :Float64;
  # samples that the rate limiter would admit after this part; infinite without a ratio
  holdsPushes @5 :Bool;
  # pushes wait, or the next one would, perhaps for samples
  minSize @6 :UInt64;
  samplesPerInsert @7 :Float64;
  maxTimesSampled @8 :UInt32;
  # of the table's definition
}

struct ReadSteps {
  # A part of the stored steps of a table, in the order of their arrival.
  bytes @0 :UInt32;
  # of chunks in the answer, unless the first one is larger
  from @1 :ReadPosition;
}

struct ReadPosition {
  # All zeros in the first request of a reading; else as in the last answer.
  number @0 :UInt16;
  # the upper 16 bits of the ids of the table's items: another number is another table of the same name
  next @1 :UInt64;
  # number of the next chunk, in the order of arrival
  end @2 :UInt64;
  # of the chunk before which the reading ends: steps that arrive after its first request are not a part of it
}

struct StepsRead {
  # The payload is the chunks' payloads, one after the other. Chunks that were evicted since the last answer are left out.
  chunks @0 :List(Chunk);
  writers @1 :List(UInt64);
  # of each chunk, the number of its writer, for as long as the server runs
  next @2 :ReadPosition;
  # null at the end
}

struct UpdatePriorities {
  ids @0 :List(UInt64);
  priorities @1 :List(Float64);
}

struct Updated {
  applied @0 :UInt32;
  stale @1 :UInt32;
}

struct ReportCorrupt {
  id @0 :UInt64;
  reason @1 :Text;
}

struct Listing {
  # Both in the order of their names.
  tables @0 :List(Text);
  # each a TableDefinition
  parameters @1 :List(ListedParameters);
}

struct ListedParameters {
  name @0 :Text;
  version @1 :UInt64;
  bytes @2 :UInt64;
  # of the safetensors file
}

struct PutParameters {
  # The payload is one safetensors file.
  name @0 :Text;
  id @1 :UInt64;
  # Random number of each put, for a client that may send it again after a broken connection: the server answers a
  # repetition with the version that it stored, and does not put it over a newer one. 0 is no repetition.
  version @2 :UInt64;
  # The version to store, unless the server has that one or a newer one: then, and for 0, it is the next. With the id 0 it
  # is a copy of another server's version, which is not stored then.
}

struct GetParameters {
  name @0 :Text;
  newerThan @1 :UInt64;
  # 0: any version
  writer @2 :UInt64;
  # The writer of the request's table that makes its steps with these parameters from now on: with an empty name, it makes no
  # more. Ignored without a table.
}

struct Parameters {
  version @0 :UInt64;
}

struct Extension {
  name @0 :Text;
  # The service: `gradients` takes and gives JSON (crates/gradients_net/src/message.rs).
}
