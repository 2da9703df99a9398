//! A world without faults but the loss of a server, and with machines that take time: thousands of actors, many servers, several learners.
//! It answers what no machine at hand can: throughput, latencies and fairness against the numbers of actors and servers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base::system;
use base::wait::Wait;
use bytes::Bytes;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_client::shards::ShardedClient;
use replay_client::{Address, Client, ConnectOptions};
use replay_core::memory::{Memory, MemoryLimits};
use replay_core::replay::{ChunkHead, NewItem, OpenWriter, PushBody, Replay, SampleRequest};
use replay_core::schema::{Codec, Column, Dtype, TableConfig, flags};
use replay_link::error::{Error, Result};
use replay_link::stack::plugged::register;
use replay_link::stack::{Stack, StackName};
use replay_server::config::ServerConfig;
use replay_server::server::Server;
use simulation::{ServiceTimes, Sim, SimStack};

use crate::client_stack::Simulated;
use crate::process::{self, sleep};

const TABLE: &str = "steps";
/// Programs start within this time, so that their pushes do not coincide.
const STARTS: Duration = Duration::from_secs(20);
/// Time before anything is measured, after the last start.
const WARM_UP: Duration = Duration::from_secs(5);
/// Time without the lost server.
const LOST: Duration = Duration::from_secs(5);
/// Time that is measured after the loss.
const AFTER_LOSS: Duration = Duration::from_secs(30);

/// What is simulated.
#[derive(Debug, Clone)]
pub struct Job {
    /// Number of actors, each with one writer.
    pub actors: usize,
    /// Number of servers.
    pub servers: usize,
    /// Number of learners.
    pub learners: usize,
    /// Steps of an actor in a second.
    pub steps_per_second: f64,
    /// Steps of one push.
    pub steps_per_push: u32,
    /// Bytes of a step.
    pub step_bytes: usize,
    /// Items of a batch.
    pub batch: u32,
    /// Batches that a learner wants in a second, each answered by an update of priorities.
    pub batches_per_second: f64,
    /// Machine of a server.
    pub times: ServiceTimes,
    /// Largest delay of the network, in one direction.
    pub delay: Duration,
    /// Time that is measured.
    pub measured: Duration,
    /// Kills the last server afterwards, and starts it again, empty.
    pub lose_server: bool,
}

/// What was found.
#[derive(Debug, Clone)]
pub struct Found {
    /// Acknowledged steps in a second, as a share of what the actors wanted to push.
    pub step_share: f64,
    /// Batches in a second, as a share of what the learners wanted.
    pub batch_share: f64,
    /// Seconds from a push to its acknowledgement: median and 99th percentile.
    pub push: [f64; 2],
    /// Seconds from a request to its batch.
    pub sample: [f64; 2],
    /// Steps of the slowest actor, as a share of the mean.
    pub slowest_actor: f64,
    /// Batches of the slowest learner, as a share of the mean.
    pub slowest_learner: f64,
    /// Share of the time in which the processors of the busiest server worked.
    pub busiest_server: f64,
    /// Longest time between two acknowledgements of an actor, and between two batches of a learner, around the loss of the server.
    pub pauses: Option<[f64; 2]>,
}

/// What the programs have done, in the current period.
#[derive(Default)]
struct Counts {
    actors: RefCell<Vec<Done>>,
    learners: RefCell<Vec<Done>>,
    /// Seconds of each push and of each batch.
    pushes: RefCell<Vec<f64>>,
    samples: RefCell<Vec<f64>>,
    end: Cell<bool>,
}

/// Steps of an actor, or batches of a learner.
#[derive(Clone, Copy)]
struct Done {
    count: u64,
    last: Instant,
    longest_pause: Duration,
}

impl Done {
    fn add(&mut self, count: u32) {
        let now = system::now();
        self.count += u64::from(count);
        self.longest_pause = self.longest_pause.max(now - self.last);
        self.last = now;
    }
}

impl Counts {
    /// Begins a period.
    fn clear(&self, job: &Job) {
        let none = Done { count: 0, last: system::now(), longest_pause: Duration::ZERO };
        *self.actors.borrow_mut() = vec![none; job.actors];
        *self.learners.borrow_mut() = vec![none; job.learners];
        self.pushes.borrow_mut().clear();
        self.samples.borrow_mut().clear();
    }
}

/// Runs a job.
///
/// # Panics
/// When a server refuses its settings.
pub fn run(job: &Job, seed: u64) -> Found {
    register(&Simulated);
    let sim = Sim::new(seed);
    let stack = sim.stack();
    let host = process::host(&stack, seed);
    stack.set_delay(Duration::ZERO..=job.delay);
    stack.set_buffer(4 << 20);
    stack.set_blocking(Duration::from_micros(100));
    let found = sim.run(measure(stack, job.clone(), seed));
    drop(sim);
    drop(host);
    found
}

async fn measure(stack: SimStack, job: Job, seed: u64) -> Found {
    let mut servers: Vec<_> = (0..job.servers).map(|index| serve(&stack, &job, index)).collect();
    let counts = Rc::new(Counts::default());
    counts.clear(&job);
    let mut random = StdRng::seed_from_u64(seed);
    for index in 0..job.actors {
        let (program, job, counts) = (stack.program(), job.clone(), counts.clone());
        let pause = random.random_range(Duration::ZERO..STARTS);
        process::start(&program, move || {
            sleep(pause);
            act(&job, &counts, index);
        });
    }
    for index in 0..job.learners {
        let (program, job, counts) = (stack.program(), job.clone(), counts.clone());
        process::start(&program, move || learn(&job, &counts, index));
    }
    stack.sleep(STARTS + WARM_UP).await;
    counts.clear(&job);
    let busy: Vec<_> = servers.iter().map(SimStack::busy).collect();
    stack.sleep(job.measured).await;
    let mut found = found(&job, &counts);
    let worked = servers.iter().zip(busy).map(|(server, before)| server.busy() - before);
    let most = worked.max().unwrap_or_default().as_secs_f64();
    found.busiest_server = most / job.measured.as_secs_f64() / job.times.processors as f64;
    if job.lose_server {
        let last = servers.pop().expect("a server");
        counts.clear(&job);
        stack.kill(&last);
        stack.sleep(LOST).await;
        serve(&stack, &job, servers.len());
        stack.sleep(AFTER_LOSS).await;
        let longest = |programs: &[Done]| {
            // Programs that still wait have the longest pause.
            let pauses = programs.iter().map(|done| done.longest_pause.max(stack.now() - done.last));
            pauses.max().unwrap_or_default().as_secs_f64()
        };
        found.pauses = Some([longest(&counts.actors.borrow()), longest(&counts.learners.borrow())]);
    }
    counts.end.set(true);
    found
}

fn found(job: &Job, counts: &Counts) -> Found {
    let (actors, learners) = (counts.actors.borrow(), counts.learners.borrow());
    let seconds = job.measured.as_secs_f64();
    let share = |programs: &[Done], rate: f64| mean(programs) / (rate * seconds);
    Found {
        step_share: share(&actors, job.steps_per_second),
        batch_share: share(&learners, job.batches_per_second),
        push: percentiles(&mut counts.pushes.borrow_mut()),
        sample: percentiles(&mut counts.samples.borrow_mut()),
        slowest_actor: slowest(&actors),
        slowest_learner: slowest(&learners),
        busiest_server: 0.0,
        pauses: None,
    }
}

/// The median and the 99th percentile; NaN without values.
fn percentiles(values: &mut [f64]) -> [f64; 2] {
    values.sort_unstable_by(f64::total_cmp);
    [0.5, 0.99].map(|share| {
        let index = (share * values.len() as f64) as usize;
        values.get(index).copied().unwrap_or(f64::NAN)
    })
}

fn mean(programs: &[Done]) -> f64 {
    programs.iter().map(|done| done.count).sum::<u64>() as f64 / programs.len() as f64
}

fn slowest(programs: &[Done]) -> f64 {
    let least = programs.iter().map(|done| done.count).min();
    least.map_or(f64::NAN, |least| least as f64 / mean(programs))
}

fn address(index: usize, stack: StackName) -> Address {
    Address::Tcp {
        tls: false,
        stack,
        // A server checks that its address is one of this machine.
        host: format!("127.0.{}.{}", index / 250, index % 250 + 1),
        port: 7710,
    }
}

/// Starts a server on a machine of its own.
fn serve(world: &SimStack, job: &Job, index: usize) -> SimStack {
    let config = ServerConfig {
        listen: vec![address(index, StackName::KERNEL)],
        // Of each client, and of each writer.
        max_connections: u32::try_from(2 * job.actors + 16 * job.learners + 16).expect("fewer than 2^31 actors"),
        ..ServerConfig::default()
    };
    let memory = Memory::new(MemoryLimits { seed: Some(index as u64), ..config.memory_limits() });
    let server = Arc::new(Server::new(&config, memory).expect("a server"));
    let stack = world.program();
    stack.set_service_times(job.times);
    let listener = stack.listen(&config.listen[0]).expect("a free address");
    stack.spawn(server.run(stack.clone(), vec![listener], vec![]));
    stack
}

/// # Panics
/// When the servers refuse the client.
fn connect(job: &Job) -> Box<dyn Replay<Error>> {
    let simulated = "sim".parse().expect("a stack that is plugged in");
    let addresses: Vec<_> = (0..job.servers).map(|index| address(index, simulated)).collect();
    let options = ConnectOptions::default();
    let wait = within(600);
    let client: Result<Box<dyn Replay<Error>>> = match addresses.as_slice() {
        [one] => Client::connect(one, options, &wait).map(|client| Box::new(client) as _),
        several => ShardedClient::connect(several, &options, &wait).map(|client| Box::new(client) as _),
    };
    let client = client.unwrap_or_else(|error| panic!("{error}"));
    let columns =
        vec![Column { codec: Codec::Lz4, ..Column::new("observation", Dtype::Uint8, vec![job.step_bytes as u32]) }];
    let mut table = TableConfig::new(TABLE, columns, 1 << 18);
    table.priority_exponent = 0.6;
    let made = client.create_table(&table, &wait);
    made.unwrap_or_else(|error| panic!("{error}"));
    client
}

fn within(seconds: u64) -> Wait<'static> {
    Wait::until(Some(system::now() + Duration::from_secs(seconds)))
}

/// Waits until the next turn of a program that has one every `period`. A turn that is late is not made up for.
fn pace(next: &mut Instant, period: Duration) {
    let now = system::now();
    *next = (*next + period).max(now);
    sleep(*next - now);
}

/// Pushes at its rate; opens another writer when a server is lost.
fn act(job: &Job, counts: &Counts, index: usize) {
    let client = connect(job);
    let mut writer = index as u64 + 1;
    while !counts.end.get() {
        // A lost server has told the writer which steps it has: another writer goes on.
        if write(job, counts, &*client, index, writer).is_err() {
            sleep(Duration::from_millis(500));
        }
        writer += job.actors as u64;
    }
}

fn write(job: &Job, counts: &Counts, client: &dyn Replay<Error>, index: usize, writer: u64) -> Result<()> {
    let open = OpenWriter {
        writer,
        name: format!("actor {index}"),
        server: Some(index as u32),
        streams: 1,
        window_before: 0,
        window_after: 0,
    };
    let mut channel = client.open_writer(TABLE, open, &within(60))?;
    let period = Duration::from_secs_f64(f64::from(job.steps_per_push) / job.steps_per_second);
    let (first, later) = (payload(job, flags::FIRST), payload(job, 0));
    let (mut next, mut step) = (system::now(), 0);
    while !counts.end.get() {
        let payload = if step == 0 { &first } else { &later };
        let begun = system::now();
        channel.push(push_body(job, step, payload), &within(60))?;
        channel.flush(&within(60))?;
        counts.pushes.borrow_mut().push(system::elapsed(begun).as_secs_f64());
        counts.actors.borrow_mut()[index].add(job.steps_per_push);
        step += u64::from(job.steps_per_push);
        pace(&mut next, period);
    }
    channel.close(&within(60))
}

/// Steps of a push: for each its flags and the size of its observation; then the observations.
fn payload(job: &Job, first: u8) -> Bytes {
    let size = (job.step_bytes as u32).to_le_bytes();
    let mut packed = Vec::new();
    for step in 0..job.steps_per_push {
        packed.push(if step == 0 { first } else { 0 });
        packed.extend(size);
    }
    packed.resize(packed.len() + job.steps_per_push as usize * job.step_bytes, 7);
    Bytes::from(packed)
}

fn push_body(job: &Job, first_step: u64, payload: &Bytes) -> PushBody {
    let rows = job.steps_per_push;
    let item = |anchor| NewItem { anchor, stream: 0, before: 0, after: 0, priority: Some(1.0) };
    PushBody {
        chunks: vec![ChunkHead { stream: 0, rows, first_step, bytes: payload.len() as u32, version: 0 }],
        items: (first_step..first_step + u64::from(rows)).map(item).collect(),
        payload: payload.clone(),
    }
}

/// Samples at its rate, each batch on demand, and updates the priorities.
fn learn(job: &Job, counts: &Counts, index: usize) {
    let client = connect(job);
    while !counts.end.get() {
        if learn_from(job, counts, &*client, index).is_err() {
            sleep(Duration::from_millis(100));
        }
    }
}

fn learn_from(job: &Job, counts: &Counts, client: &dyn Replay<Error>, index: usize) -> Result<()> {
    let request = SampleRequest { count: job.batch, ..SampleRequest::default() };
    let mut channel = client.samples(TABLE, request, 0)?;
    let mut updates = client.updates()?.ok_or(Error::Closed("updates"))?;
    let mut next = system::now();
    while !counts.end.get() {
        let begun = system::now();
        let sampled = channel.next(&within(60))?;
        counts.samples.borrow_mut().push(system::elapsed(begun).as_secs_f64());
        counts.learners.borrow_mut()[index].add(1);
        let ids: Vec<_> = sampled.items.iter().map(|item| item.id).collect();
        if let Some(credit) = sampled.credit {
            credit.delivered();
        }
        let priorities: Vec<_> = (0..ids.len()).map(|item| 1.0 + item as f64).collect();
        updates.send(TABLE, &ids, &priorities, &within(60))?;
        pace(&mut next, Duration::from_secs_f64(1.0 / job.batches_per_second));
    }
    updates.flush(&within(60)).map(drop)
}
