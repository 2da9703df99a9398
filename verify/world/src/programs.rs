//! Programs of the world's users: actors, learners, operators, and a hostile client.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base::system;
use base::wait::Wait;
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use replay_client::shards::ShardedClient;
use replay_client::{Address, Client, ConnectOptions};
use replay_core::replay::{OpenWriter, PushChannel, Replay, SampleRequest};
use replay_core::schema::{Sampler, TableConfig};
use replay_link::Commands;
use replay_link::error::{Error, Result};
use replay_link::stack::Stack;
use replay_wire::{ErrorCode, RequestBody};
use simulation::SimStack;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::ledger::{LONGEST_EPISODE, Ledger, TABLE, episodes, push_body};
use crate::machine::Machine;
use crate::process::sleep;

/// Most steps before an anchor that a learner asks for.
pub const MOST_BEFORE: u16 = 3;

/// Steps before an episode's first one, and most after it.
const EPISODE_WINDOW: (u16, u16) = (1, LONGEST_EPISODE - 1);

/// What the programs share.
#[derive(Clone)]
pub struct Users {
    /// Addresses of the servers, for clients.
    pub addresses: Vec<Address>,
    /// Definition of the table.
    pub table: TableConfig,
    /// What they have sent.
    pub ledger: Ledger,
    /// How they connect.
    pub options: ConnectOptions,
    /// Whether an item is a whole episode, or else the window of a step.
    pub whole: bool,
    /// Whether operators empty and drop the table.
    pub removes: bool,
    /// The faults have ended.
    pub calm: Rc<Cell<bool>>,
    /// Actors push nothing and learners update no priorities.
    pub still: Rc<Cell<bool>>,
    /// End of the programs' loops.
    pub end: Rc<Cell<bool>>,
    /// The servers, whose items are counted.
    pub machines: Vec<Machine>,
    /// Number of live items at the last look, at most a second ago, while there are no faults.
    pub items_before: Rc<Cell<Option<u64>>>,
}

impl Users {
    /// Number of live items on all servers.
    pub fn live_items(&self) -> u64 {
        self.machines.iter().map(Machine::live_items).sum()
    }

    /// Number of live items, where all have the same probability and while there are no faults: the smaller one of the last look and now.
    /// A batch was drawn earlier: since then items have come, or ended with their last samples.
    fn equal_items(&self) -> Option<u64> {
        let TableConfig { priority_exponent, sampler, max_sample_lag, .. } = self.table;
        // Items that expire leave a client with an old sum of their server.
        let equal = priority_exponent == 0.0 && sampler == Sampler::Prioritized && max_sample_lag == 0;
        let before = self.items_before.get().filter(|_| equal)?;
        Some(before.min(self.live_items()))
    }

    /// The oldest version that a sample from now on may have, until a server starts again; `None` for a table that names no parameters.
    fn oldest_version(&self) -> Option<u64> {
        let name = self.table.parameters.as_deref()?;
        let newest = self.machines.iter().map(|machine| Some(machine.memory()?.parameters().version(name)));
        // A client may sample any of the servers.
        let newest = newest.map(Option::unwrap_or_default).min().unwrap_or(0);
        Some(newest.saturating_sub(self.table.max_sample_lag.into()))
    }

    fn ended(&self) -> bool {
        self.end.get()
    }

    /// A client of the memory, as soon as there is one; `None` at the end.
    fn connect(&self) -> Option<Arc<dyn Commands>> {
        while !self.ended() {
            let wait = within(20);
            let connected: Result<Arc<dyn Commands>> = match self.addresses.as_slice() {
                [one] => Client::connect(one, self.options.clone(), &wait).map(|client| Arc::new(client) as _),
                several => ShardedClient::connect(several, &self.options, &wait).map(|client| Arc::new(client) as _),
            };
            match connected.and_then(|client| {
                client.create_table(&self.table, &wait)?;
                Ok(client)
            }) {
                Ok(client) => return Some(client),
                Err(error) => refuse_faults(&error),
            }
            sleep(Duration::from_secs(1));
        }
        None
    }
}

/// A wait of so many seconds.
pub fn within(seconds: u64) -> Wait<'static> {
    Wait::until(Some(system::now() + Duration::from_secs(seconds)))
}

/// Takes an error of a fault of network or machine.
///
/// # Panics
/// For an error that no fault of network or machine explains.
pub fn refuse_faults(error: &Error) {
    let expected = matches!(
        error.code(),
        ErrorCode::Deadline
            | ErrorCode::Connect
            | ErrorCode::Disconnected
            | ErrorCode::Closed
            | ErrorCode::Expired
            | ErrorCode::Fenced
            | ErrorCode::UnknownTable
            | ErrorCode::Io
    );
    assert!(expected, "{error:?}: {error}");
}

/// Pushes steps by one writer after the other.
pub fn act(users: &Users, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    while let Some(replay) = users.connect() {
        let writer = users.ledger.writer();
        // At least what learners ask for, or the server refuses their requests.
        let window = random.random_range(MOST_BEFORE..6);
        let (window_before, window_after) = if users.whole { EPISODE_WINDOW } else { (window, 0) };
        let open = OpenWriter {
            writer,
            name: format!("writer {writer}"),
            server: None,
            streams: 1,
            window_before,
            window_after,
        };
        let pushes = random.random_range(1..60);
        let result = replay
            .open_writer(TABLE, open, &within(30))
            .and_then(|channel| write(users, &*replay, channel, writer, window, pushes, &mut random));
        if let Err(error) = result {
            if let Some(steps) = steps_left(&error) {
                users.ledger.told(writer, steps);
            }
            refuse_faults(&error);
        }
    }
}

/// Steps that are there according to the error of a writer whose server has started again.
fn steps_left(error: &Error) -> Option<u64> {
    let text = error.to_string();
    let (_, rest) = text.split_once("without the last ")?;
    let (lost, rest) = rest.split_once(" of the ")?;
    let (steps, _) = rest.split_once(" steps")?;
    Some(steps.parse::<u64>().ok()? - lost.parse::<u64>().ok()?)
}

fn write(
    users: &Users,
    replay: &dyn Replay<Error>,
    mut channel: Box<dyn PushChannel<Error>>,
    writer: u64,
    window: u16,
    pushes: u32,
    random: &mut StdRng,
) -> Result<()> {
    let (mut next, mut since, mut version) = (0, users.ledger.starts(), 0);
    for _ in 0..pushes {
        if users.ended() {
            break;
        }
        if users.still.get() {
            sleep(Duration::from_millis(100));
            continue;
        }
        let rows = random.random_range(1..8);
        let end = next + u64::from(rows);
        if let Some(name) = &users.table.parameters
            && random.random_bool(0.5)
        {
            let newer = replay.get_parameters(name, version, None, &within(20))?;
            version = newer.map_or(version, |newer| newer.version);
        }
        users.ledger.makes(writer, next, version);
        users.ledger.sends(writer, end);
        let mut body = push_body(writer, next, rows, window);
        body.chunks[0].version = version;
        if users.whole {
            body.items = episodes(writer, next..end);
        }
        match channel.push(body, &within(20)) {
            Ok(()) => next = end,
            // It was not accepted; the same steps are pushed again.
            Err(error) if error.code() == ErrorCode::Deadline => continue,
            Err(error) => return Err(error),
        }
        if random.random_bool(0.2) {
            match channel.flush(&within(60)) {
                Ok(()) => {
                    users.ledger.acknowledged(writer, next, since);
                    since = users.ledger.starts();
                }
                Err(error) if error.code() == ErrorCode::Deadline => {}
                Err(error) => return Err(error),
            }
        }
        sleep(Duration::from_millis(random.random_range(0..300)));
    }
    match random.random_range(0..4) {
        // It is dropped, as if the program had ended.
        0 => Ok(()),
        _ => {
            channel.close(&within(120))?;
            users.ledger.acknowledged(writer, next, since);
            Ok(())
        }
    }
}

/// Samples, updates priorities, and publishes parameters.
pub fn learn(users: &Users, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    while let Some(replay) = users.connect() {
        let steps = random.random_range(5..100);
        if let Err(error) = learn_from(users, &*replay, steps, &mut random) {
            refuse_faults(&error);
        }
    }
}

fn learn_from(users: &Users, replay: &dyn Replay<Error>, steps: u32, random: &mut StdRng) -> Result<()> {
    let count = random.random_range(1..40);
    let before = random.random_range(0..=MOST_BEFORE);
    let (before, after) = if users.whole { EPISODE_WINDOW } else { (before, 0) };
    let request = SampleRequest {
        count,
        before,
        after,
        allow_short: random.random_bool(0.3),
        min_probability: random.random_bool(0.3),
        share: None,
        definition: 0,
        lease_ms: 0,
    };
    // Starts of servers and version of the last put.
    let (begun, mut last) = (users.ledger.starts(), None);
    let in_flight = random.random_range(0..4);
    let mut channel = replay.samples(TABLE, request, in_flight)?;
    // Bound of the versions of a batch that is not drawn yet.
    let mut asked = None;
    for _ in 0..steps {
        if users.ended() {
            break;
        }
        let (since, oldest) = *asked.get_or_insert_with(|| (users.ledger.starts(), users.oldest_version()));
        let sampled = match channel.next(&within(20)) {
            Ok(sampled) => sampled,
            Err(error) if error.code() == ErrorCode::Deadline => continue,
            Err(error) => return Err(error),
        };
        // Batches in flight were drawn before the call.
        let is_bound = in_flight == 0 && since == users.ledger.starts();
        let oldest = oldest.map(|oldest| if is_bound { oldest } else { 0 });
        asked = None;
        users.ledger.check_sample(&request, &sampled, users.equal_items(), oldest);
        let most = users.table.max_times_sampled;
        // Earlier batches may come after a start.
        if most > 0 && begun == users.ledger.starts() {
            users.ledger.check_delivered(&sampled, most);
        }
        let ids: Vec<_> = sampled.items.iter().map(|item| item.id).collect();
        let priorities: Vec<_> = ids.iter().map(|_| random.random_range(0.0..10.0)).collect();
        if let Some(credit) = sampled.credit {
            credit.delivered();
        }
        if !users.still.get() {
            let receipt = replay.update_priorities(TABLE, &ids, &priorities, &within(30))?;
            assert_eq!((receipt.applied + receipt.stale) as usize, ids.len(), "every id counts");
        }
        if random.random_bool(0.1) {
            let starts = users.ledger.starts();
            let put = replay.put_parameters("policy", parameters(random.random()), &within(30))?;
            let got = replay.get_parameters("policy", 0, None, &within(30))?;
            let one_server = users.addresses.len() == 1;
            // A server that has started again counts from its snapshot.
            if one_server && starts == users.ledger.starts() {
                let got = got.map_or(0, |got| got.version);
                assert!(got >= put, "version {got} after {put}");
                if let Some((before, version)) = last.replace((starts, put)) {
                    assert!(before != starts || put > version, "{put} after {version}");
                }
            }
        }
        sleep(Duration::from_millis(random.random_range(0..200)));
    }
    Ok(())
}

/// A file of parameters with a content of its own.
pub fn parameters(number: u32) -> Bytes {
    let header = format!("{{\"__metadata__\":{{\"put\":\"{number:010}\"}}}}");
    [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat().into()
}

/// Looks at the memory; empties and drops the table where a world has that.
pub fn operate(users: &Users, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    while let Some(replay) = users.connect() {
        for _ in 0..random.random_range(1..20) {
            let removes = users.removes && !users.calm.get();
            let asked = match random.random_range(0..10) {
                0 if removes => replay.command(RequestBody::EmptyTable(TABLE.into()), &within(20)),
                1 if removes => replay.drop_table(TABLE, &within(20)),
                2..=4 => replay.list(&within(20)).map(drop),
                5..=7 => replay.table_config(TABLE, &within(20)).map(drop),
                _ => replay.stats(&within(20)).map(drop),
            };
            if let Err(error) = asked {
                refuse_faults(&error);
            }
            sleep(Duration::from_millis(random.random_range(0..2_000)));
        }
    }
}

/// Sends bytes that are no protocol, and goes away.
pub async fn annoy(stack: SimStack, server: Address, users: Users, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    while !users.ended() {
        stack.sleep(Duration::from_millis(random.random_range(0..3_000))).await;
        let Ok(mut stream) = stack.connect(&server) else {
            continue;
        };
        let mut bytes = vec![0; random.random_range(0..200)];
        random.fill_bytes(&mut bytes);
        if random.random_bool(0.5) && bytes.len() >= 8 {
            // A plausible length.
            bytes[..8].copy_from_slice(&[64, 0, 0, 0, 8, 0, 0, 0]);
        }
        let _ = stream.write_all(&bytes).await;
        if random.random_bool(0.5) {
            let mut reply = [0; 64];
            let _ =
                replay_link::stack::until(&stack, stack.now() + Duration::from_secs(5), stream.read(&mut reply)).await;
        }
    }
}

/// Starts a program.
pub fn start(world: &SimStack, users: &Users, program: impl FnOnce(&Users) + 'static) -> SimStack {
    let (stack, users) = (world.program(), users.clone());
    crate::process::start(&stack, move || program(&users));
    stack
}
