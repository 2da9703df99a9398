//! Sequences of requests to a server's memory. A ledger of the pushed steps says what a sample may have.

mod call;
pub(crate) mod ledger;

use std::sync::Arc;

use bytes::Bytes;

use crate::allocations;
pub use call::{Call, Capacity, Chance, ChunkCall, ItemCall, PushCall, Table, Writer};
use ledger::{Step, TABLES, TableLedger, pack, table_config, version_of};
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{
    BatchShare, ChangeLease, ChunkHead, NewItem, OpenWriter, Push, PushBody, ReadPosition, ReadSteps, SampleRequest,
    Sampled,
};
use replay_core::table::leases::Reader;
use replay_core::table::{Attempt, Turn};
use replay_server::reply_budget::ReplyBudgets;
use replay_server::service::{NumberedTable, Service};
use replay_wire::{
    CloseWriter, ErrorCode, GetParameters, OpenOrResume, PutParameters, ReplyBody, ReportCorrupt, RequestBody,
    UpdatePriorities,
};

/// Limit of the memory: tables with the largest capacities do not fit.
const MEMORY: u64 = 8 << 20;
/// Limit of a request's allocations, in bytes, in addition to its payload.
const REQUEST: u64 = 256 << 10;
/// Batches that are not delivered yet.
const HELD: usize = 4;

/// Makes a table of the `kind` with a writer, then the calls, and compares their answers with the ledger. Returns the number of sampled
/// items.
///
/// # Panics
/// When an answer is wrong, an error is the memory's own fault, a request allocates too much, or bytes stay reserved at the end.
pub fn run(kind: u8, calls: &[Call]) -> usize {
    let mut world = World::new();
    let (table, writer) = (Table::FIRST, Writer::FIRST);
    world.create(table, kind, Capacity::Small(40));
    world.call(&Call::Open { table, writer, streams: 2, before: 2, after: 2, resume: false });
    for call in calls {
        world.call(call);
    }
    world.end()
}

struct World {
    service: Service,
    memory: Arc<Memory>,
    tables: [Option<TableLedger>; TABLES.len()],
    generation: u16,
    held: Vec<Sampled>,
    reader: Reader,
    read: Option<ReadPosition>,
    sampled: usize,
}

impl World {
    fn new() -> Self {
        let memory = Memory::new(MemoryLimits {
            max_bytes: MEMORY,
            receive_bytes: 1 << 20,
            seed: Some(1),
            ..MemoryLimits::default()
        });
        let service = Service::new(memory.clone(), &[], 1 << 20, ReplyBudgets::new(1 << 20, 1));
        World {
            service: service.expect("no tables are configured"),
            memory,
            tables: [const { None }; TABLES.len()],
            generation: 0,
            held: Vec::new(),
            reader: Reader::from("the connection"),
            read: None,
            sampled: 0,
        }
    }

    /// Makes a request; `None` after an error or where it would have to wait.
    fn ask(&self, request: &RequestBody, bytes: u64) -> Option<ReplyBody> {
        self.ask_of(None, request, bytes)
    }

    /// Makes a request about a table, which is the connection's first.
    fn ask_about(&self, table: Table, request: &RequestBody, bytes: u64) -> Option<ReplyBody> {
        self.ask_of(Some(&NumberedTable::named(TABLES[table.index()])), request, bytes)
    }

    fn ask_of(&self, table: Option<&NumberedTable>, request: &RequestBody, bytes: u64) -> Option<ReplyBody> {
        let ask = || self.service.attempt(request, table, true, &mut Turn::default(), &self.reader);
        match allocations::within(REQUEST + bytes, request.name(), ask) {
            Ok(Attempt::Ready(reply)) => Some(reply),
            Ok(Attempt::Blocked(_)) => None,
            Err(error) => {
                assert_ne!(error.code(), ErrorCode::Internal, "{error}");
                None
            }
        }
    }

    fn ledger(&mut self, table: Table) -> Option<&mut TableLedger> {
        self.tables[table.index()].as_mut()
    }

    fn call(&mut self, call: &Call) {
        match call {
            Call::Create { table, kind, capacity } => self.create(*table, *kind, *capacity),
            &Call::Open { table, writer, streams, before, after, resume } => {
                let open = OpenWriter {
                    writer: number(writer),
                    name: format!("writer {}", writer.index()),
                    server: None,
                    streams,
                    window_before: before,
                    window_after: after,
                };
                let request = OpenOrResume { open, resume };
                if let Some(ReplyBody::Writer(opened)) =
                    self.ask_about(table, &RequestBody::OpenWriter(request.clone()), 0)
                {
                    let ledger = self.ledger(table).expect("the table exists");
                    ledger.open(writer.index(), &request.open, &opened);
                }
            }
            &Call::Close(table, writer, chance) if chance.is_seldom() => self.close(table, writer),
            Call::Push(push) => self.push(push),
            &Call::Sample { table, count, before, after, allow_short, min_probability, part, delivered } => {
                let request = SampleRequest {
                    count,
                    before,
                    after,
                    allow_short,
                    min_probability,
                    share: (part < 40).then_some(BatchShare { take: part }),
                    definition: 0,
                    lease_ms: if part < 60 { 0 } else { SampleRequest::NO_END },
                };
                self.sample(table, request, delivered);
            }
            &Call::Deliver(delivered) if !self.held.is_empty() => {
                finish(self.held.remove(0), delivered);
            }
            Call::Update(table, updates) => self.update(*table, updates),
            &Call::Read { table, go_on, number, next, bytes } => {
                let from = self.read.take().filter(|_| go_on).unwrap_or(ReadPosition {
                    number,
                    next: next.into(),
                    ..ReadPosition::default()
                });
                let request = ReadSteps { from, bytes: bytes.into() };
                if let Some(ReplyBody::StepsRead(read)) = self.ask_about(table, &RequestBody::ReadSteps(request), 0) {
                    self.ledger(table).expect("the table exists").check_steps(&read);
                    self.read = read.next;
                }
            }
            &Call::Corrupt(table, pick) => {
                let id = self.ledger(table).map_or(pick, |ledger| ledger.id(pick));
                let request = ReportCorrupt { id, reason: "does not decode".into() };
                if let Some(ReplyBody::Corrupt(Some(_))) =
                    self.ask_about(table, &RequestBody::ReportCorrupt(request), 0)
                {
                    self.ledger(table).expect("the table exists").remove(id);
                }
            }
            &Call::Empty(table, chance) if chance.is_seldom() => {
                if self.ask(&RequestBody::EmptyTable(name(table)), 0).is_some() {
                    self.ledger(table).expect("the table exists").empty();
                }
            }
            &Call::DropTable(table, chance) if chance.is_seldom() => {
                if self.ask(&RequestBody::DropTable(name(table)), 0).is_some() {
                    self.tables[table.index()] = None;
                }
            }
            &Call::Describe(table) => {
                let described = self.ask(&RequestBody::DescribeTable(name(table)), 0);
                let known = self.ledger(table).map(|ledger| &ledger.config);
                match (described, known) {
                    (Some(ReplyBody::Table(config)), Some(known)) => assert_eq!(config, *known),
                    (None, None) => {}
                    (described, known) => panic!("{:?}, {known:?}", described.is_some()),
                }
            }
            Call::Put { id, version, valid, bytes } => {
                let request = RequestBody::PutParameters(PutParameters {
                    name: "policy".into(),
                    id: (*id).into(),
                    version: (*version).into(),
                    bytes: match valid {
                        true => safetensors(bytes),
                        false => Bytes::copy_from_slice(bytes),
                    },
                });
                self.ask(&request, 0);
            }
            Call::Get { newer_than, writer } => {
                let request = RequestBody::GetParameters(GetParameters {
                    name: "policy".into(),
                    newer_than: (*newer_than).into(),
                    writer: writer.map_or(0, |(_, writer)| number(writer)),
                });
                let found = match writer {
                    Some((table, _)) => self.ask_about(*table, &request, 0),
                    None => self.ask(&request, 0),
                };
                if let Some(ReplyBody::Parameters(Some(found))) = found {
                    assert!(found.version > u64::from(*newer_than));
                }
            }
            Call::DropParameters(chance) if chance.is_seldom() => {
                drop(self.ask(&RequestBody::DropParameters("policy".into()), 0))
            }
            Call::List => {
                let Some(ReplyBody::Listing(listing)) = self.ask(&RequestBody::List, 0) else {
                    panic!("a list needs nothing");
                };
                let names: Vec<_> = listing.tables.iter().map(|table| &*table.name).collect();
                assert!(names.is_sorted());
                assert_eq!(names.len(), self.tables.iter().flatten().count());
            }
            Call::Stats => {
                let stats = self.ask(&RequestBody::Stats, 0);
                assert!(matches!(stats, Some(ReplyBody::Stats(_))));
            }
            Call::Deliver(_) | Call::Close(..) | Call::Empty(..) | Call::DropTable(..) | Call::DropParameters(_) => {}
        }
    }

    fn create(&mut self, table: Table, kind: u8, capacity: Capacity) {
        let capacity = match capacity {
            Capacity::Small(capacity) => capacity.into(),
            Capacity::Any(capacity) => capacity,
        };
        let config = table_config(&name(table), kind, capacity);
        // The index of a table that fits is within the limit.
        let made = self.ask(&RequestBody::CreateTable(config.clone()), MEMORY);
        if made.is_some() && self.ledger(table).is_none() {
            self.generation += 1;
            let ledger = TableLedger::new(self.generation, config);
            self.tables[table.index()] = Some(ledger);
        }
    }

    fn close(&mut self, table: Table, writer: Writer) {
        let known = self.ledger(table).and_then(|ledger| ledger.writers.get(&writer.index()));
        let epoch = known.map_or(1, |known| known.epoch);
        let close = CloseWriter { writer: number(writer), epoch };
        let closed = self.ask_about(table, &RequestBody::CloseWriter(close), 0).is_some();
        let ledger = self.ledger(table);
        if closed && let Some(known) = ledger.and_then(|known| known.writers.get_mut(&writer.index())) {
            known.closed = true;
        }
    }

    fn push(&mut self, call: &PushCall) {
        let Some(ledger) = self.ledger(call.table) else {
            return;
        };
        let generation = ledger.generation;
        let known = ledger.writers.get(&call.writer.index()).cloned().unwrap_or_default();
        let streams = known.streams.max(1);
        let mut next = known.next;
        let mut payload = Vec::new();
        let mut chunks: Vec<ChunkHead> = Vec::new();
        for chunk in &call.chunks {
            let stream = chunk.stream % streams + u32::from(chunk.wrong == 0);
            let twice = chunks.iter().any(|other| other.stream == stream);
            if twice && chunk.wrong != 1 {
                continue;
            }
            let step = next.entry(stream).or_default();
            let first_step = match chunk.wrong {
                2 => step.wrapping_sub(1),
                // A gap.
                3..8 => *step + u64::from(chunk.wrong),
                _ => *step,
            };
            let rows = if chunk.wrong == 8 { 0 } else { chunk.rows };
            let packed = pack(
                generation,
                Step { writer: call.writer.index(), stream: stream as u8, number: first_step as u32 },
                rows,
            );
            let bytes = packed.len() as u32;
            chunks.push(ChunkHead {
                stream,
                rows,
                first_step,
                bytes: match chunk.wrong {
                    9 => bytes + 1,
                    10 => bytes.saturating_sub(1),
                    _ => bytes,
                },
                version: version_of(first_step),
            });
            payload.extend(packed);
            *step = first_step.wrapping_add(rows.into());
        }
        let (before, after) = known.window;
        let items = call.items.iter().map(|item| {
            let stream = item.stream % streams;
            let end = next.get(&stream).copied().unwrap_or(0);
            let after = item.after % (after + 1);
            let last = end.saturating_sub(1 + u64::from(item.back));
            let anchor = last.saturating_sub(after.into());
            let before = (item.before % (before + 1)).min(anchor as u16);
            // NaN, infinities and negative numbers: all of the push is refused.
            let valid = |priority: &f32| item.wrong == 4 || (0.0..f32::INFINITY).contains(priority);
            NewItem {
                anchor: anchor.wrapping_add(u64::from(item.wrong == 0)),
                stream: stream + u32::from(item.wrong == 1),
                before: before + u16::from(item.wrong == 2),
                after: after + u16::from(item.wrong == 3),
                priority: item.priority.filter(valid),
            }
        });
        let items = items.collect();
        let mut spoiled = false;
        let (at, value) = call.spoil;
        if call.wrong == 0
            && let Some(byte) = payload.get_mut(usize::from(at))
        {
            spoiled = *byte != value;
            *byte = value;
        }
        let push = Push {
            writer: number(call.writer),
            epoch: match call.wrong {
                1 => known.epoch.wrapping_sub(1),
                2 => known.epoch + 1,
                _ => known.epoch,
            },
            sequence: match call.wrong {
                3 => known.sequence,
                4 => known.sequence + 2,
                _ => known.sequence + 1,
            },
            body: PushBody { chunks, items, payload: payload.into() },
        };
        let bytes = 4 * push.body.payload.len() as u64;
        if self.ask_about(call.table, &RequestBody::Push(push.clone()), bytes).is_some() {
            let ledger = self.ledger(call.table).expect("the table exists");
            ledger.push(call.writer.index(), &push);
            ledger.spoiled |= spoiled;
        }
    }

    fn sample(&mut self, table: Table, request: SampleRequest, delivered: bool) {
        let body = RequestBody::Sample(request);
        let Some(ReplyBody::Sampled(sampled)) = self.ask_about(table, &body, 0) else {
            return;
        };
        let newest = self.memory.parameters().version("policy");
        let ledger = self.ledger(table).expect("the table exists");
        ledger.check_sample(&request, &sampled, newest);
        self.sampled += sampled.items.len();
        assert_eq!(sampled.lease > 0, request.lease_ms > 0, "a lease is asked for");
        if delivered && sampled.lease > 0 {
            let change = |lease, begin| {
                let request = RequestBody::ChangeLease(ChangeLease { lease, begin });
                self.ask_about(table, &request, 0).is_some()
            };
            assert!(change(sampled.lease, true), "it begins");
            assert!(!change(sampled.lease ^ 1, false), "another one is unknown");
            assert!(change(sampled.lease, false), "it is acknowledged");
            assert!(!change(sampled.lease, false), "it is over");
        }
        if delivered || self.held.len() == HELD {
            finish(sampled, delivered);
        } else {
            self.held.push(sampled);
        }
    }

    fn update(&mut self, table: Table, updates: &[(u64, f64)]) {
        let ledger = self.ledger(table);
        let id = |pick| ledger.as_ref().map_or(pick, |ledger| ledger.id(pick));
        let ids: Vec<_> = updates.iter().map(|&(pick, _)| id(pick)).collect();
        let count = ids.len() as u32;
        let request = UpdatePriorities { ids, priorities: updates.iter().map(|&(_, priority)| priority).collect() };
        if let Some(ReplyBody::Updated(receipt)) = self.ask_about(table, &RequestBody::UpdatePriorities(request), 0) {
            assert_eq!(receipt.applied + receipt.stale, count, "every id counts");
        }
    }

    /// Drops everything, after which nothing is reserved.
    fn end(mut self) -> usize {
        self.held.clear();
        for table in TABLES {
            self.ask(&RequestBody::DropTable(table.into()), 0);
        }
        self.ask(&RequestBody::DropParameters("policy".into()), 0);
        assert_eq!(self.memory.stats()["reserved_bytes"], 0);
        self.sampled
    }
}

fn finish(sampled: Sampled, delivered: bool) {
    if let Some(credit) = sampled.credit
        && delivered
    {
        credit.delivered();
    }
}

fn name(table: Table) -> String {
    TABLES[table.index()].into()
}

fn number(writer: Writer) -> u64 {
    u64::from(writer.index()) + 1
}

/// A safetensors file of one tensor.
fn safetensors(bytes: &[u8]) -> Bytes {
    let count = bytes.len();
    let header = format!(r#"{{"w":{{"dtype":"U8","shape":[{count}],"data_offsets":[0,{count}]}}}}"#);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(bytes);
    file.into()
}
