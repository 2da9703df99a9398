//! A world from its seed: settings, faults, quiet at the end, a trial.

mod faults;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_client::{Address, ConnectOptions};
use replay_core::schema::{Sampler, TableConfig};
use replay_link::stack::plugged::register;
use replay_link::stack::{Stack, StackName};
use replay_server::config::ServerConfig;
use simulation::{Sim, SimStack};

use crate::client_stack::Simulated;
use crate::disk::{DiskFaults, SimDisk};
use crate::ledger::{Ledger, TABLE, table};
use crate::machine::Machine;
use crate::process;
use crate::programs::{self, Users};
use crate::trials::Trial;

/// Time after which the kernel ends a connection whose peer is silent.
const USER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for everybody to go on after the last fault: clients leave an absent server out for as long as it takes to find it again.
const RECOVERY: Duration = Duration::from_secs(180);
/// Time for the programs to end.
const ENDING: Duration = Duration::from_secs(600);
/// Time for a trial, whose clock may jump by hours.
const TRIAL: Duration = Duration::from_secs(20_000);

/// What a world did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Hash of all events.
    pub events: u64,
    /// Steps that were acknowledged.
    pub steps: u64,
    /// Batches that were sampled.
    pub samples: u64,
    /// Faults.
    pub faults: u32,
    /// Simulated time.
    pub time: Duration,
}

/// Runs the world of a seed.
///
/// # Panics
/// When a promise is broken.
pub fn run(seed: u64) -> Outcome {
    register(&Simulated);
    let options = ConnectOptions::default();
    let sim = Sim::new(seed);
    let stack = sim.stack();
    let host = process::host(&stack, seed);
    let begun = stack.now();
    let faults = Rc::new(Cell::new(0));
    let ledger = Ledger::default();
    let story = Story::new(&stack, seed, options, &ledger, faults.clone());
    sim.run(story.tell());
    let outcome = Outcome {
        events: stack.events(),
        steps: ledger.steps(),
        samples: ledger.samples(),
        faults: faults.get(),
        time: stack.now() - begun,
    };
    // What is left of the programs ends by the world's clock.
    drop(sim);
    drop(host);
    outcome
}

struct Story {
    stack: SimStack,
    random: StdRng,
    save_every: Duration,
    users: Users,
    /// Programs that may be killed, and how they are started again.
    programs: Vec<(SimStack, Role)>,
    faults: Rc<Cell<u32>>,
    next_seed: u64,
}

#[derive(Clone, Copy)]
enum Role {
    Actor,
    Learner,
    Operator,
}

impl Story {
    fn new(stack: &SimStack, seed: u64, options: ConnectOptions, ledger: &Ledger, faults: Rc<Cell<u32>>) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let servers = random.random_range(1..=3);
        let mut definition = table();
        if random.random_bool(0.5) {
            definition.samples_per_insert = random.random_range(0.5..8.0);
            if random.random_bool(0.3) {
                // A few batches stop everybody.
                definition.slack = servers as f64 * (50.0 + definition.samples_per_insert);
            }
        }
        if random.random_bool(0.2) {
            definition.max_times_sampled = random.random_range(1..4);
            let most = f64::from(definition.max_times_sampled);
            definition.samples_per_insert = definition.samples_per_insert.min(most);
            if servers == 1 {
                let samplers = [Sampler::Prioritized, Sampler::Fifo, Sampler::Lifo, Sampler::MaxHeap];
                definition.sampler = samplers[random.random_range(0..samplers.len())];
            }
        }
        let small = random.random_bool(0.3);
        if small {
            definition.capacity = random.random_range(300..1_000);
        }
        let removes = random.random_bool(0.2);
        if small || removes {
            ledger.expect_evictions();
        }
        if random.random_bool(0.3) {
            definition.priority_exponent = 0.0;
        }
        if seed % 3 == 1 {
            (definition.parameters, definition.max_sample_lag) = (Some("policy".into()), 1 + (seed % 4) as u32);
        }
        let whole = seed % 5 == 2;
        ledger.expect_episodes(whole);
        let pause = match random.random_bool(0.2) {
            true => Duration::from_millis(500),
            false => Duration::ZERO,
        };
        let machines = (0..servers).map(|index| {
            let config = ServerConfig {
                listen: vec![address(index, StackName::KERNEL)],
                max_bytes: 256 << 20,
                max_frame_bytes: 1 << 20,
                ..ServerConfig::default()
            };
            Machine::new(stack, index, config, SimDisk::new(random.random(), pause), ledger)
        });
        let machines = machines.collect();
        let simulated = "sim".parse().expect("a stack that is plugged in");
        let users = Users {
            addresses: (0..servers).map(|index| address(index, simulated)).collect(),
            table: definition,
            ledger: ledger.clone(),
            options: ConnectOptions { pushes_in_flight: random.random_range(1..32), ..options },
            whole,
            removes,
            calm: Rc::default(),
            still: Rc::default(),
            end: Rc::default(),
            machines,
            items_before: Rc::default(),
        };
        Story {
            stack: stack.clone(),
            save_every: Duration::from_secs(random.random_range(2..20)),
            random,
            users,
            programs: Vec::new(),
            faults,
            next_seed: seed << 16,
        }
    }

    async fn tell(mut self) {
        for machine in &self.users.machines {
            assert!(machine.start(self.save_every), "a new disk is in order");
        }
        for _ in 0..self.random.random_range(1..4) {
            self.start(Role::Actor);
        }
        for _ in 0..self.random.random_range(1..3) {
            self.start(Role::Learner);
        }
        self.start(Role::Operator);
        if self.random.random_bool(0.5) {
            let seed = self.seed();
            let server = address(0, StackName::KERNEL);
            let hostile = self.stack.program();
            let annoy = programs::annoy(hostile.clone(), server, self.users.clone(), seed);
            hostile.spawn(annoy);
        }
        let end = self.stack.now() + Duration::from_secs(self.random.random_range(20..120));
        while self.stack.now() < end {
            let pause = Duration::from_millis(self.random.random_range(10..8_000));
            self.stack.sleep(pause).await;
            self.faults.set(self.faults.get() + 1);
            self.fault().await;
            self.check_ratio();
        }
        self.recover().await;
        self.look_at_quiet().await;
        self.count_samples().await;
        self.end().await;
        self.check_episodes();
        self.try_one().await;
        self.check_end();
    }

    fn seed(&mut self) -> u64 {
        self.next_seed += 1;
        self.next_seed
    }

    fn start(&mut self, role: Role) {
        let seed = self.seed();
        let program = programs::start(&self.stack, &self.users, move |users| match role {
            Role::Actor => programs::act(users, seed),
            Role::Learner => programs::learn(users, seed),
            Role::Operator => programs::operate(users, seed),
        });
        self.programs.push((program, role));
    }

    /// The faults end; everybody goes on within a bound.
    async fn recover(&mut self) {
        self.users.calm.set(true);
        // Slow until silent links have ended: before that there is nothing to see, and a fast network costs a world a fifth of its time.
        self.stack.set_delay(Duration::ZERO..=Duration::from_millis(100));
        self.stack.set_buffer(64 << 10);
        self.stack.set_returns_zero(false);
        self.power_failures().await;
        for machine in &self.users.machines {
            machine.disk().set_faults(DiskFaults::default());
        }
        self.stack.sleep(USER_TIMEOUT).await;
        self.stack.set_delay(Duration::ZERO..=Duration::from_millis(2));
        let ledger = self.users.ledger.clone();
        let (steps, samples) = (ledger.steps(), ledger.samples());
        let late = self.stack.now() + RECOVERY;
        while ledger.samples() == samples || ledger.steps() <= steps {
            assert!(
                self.stack.now() < late,
                "no progress after the last fault: {} samples, {} steps",
                ledger.samples() - samples,
                ledger.steps() as i64 - steps as i64,
            );
            self.stack.sleep(Duration::from_secs(1)).await;
        }
    }

    /// Lets the learners compare probabilities with the number of items on all servers, while there are no faults.
    async fn look_at_quiet(&mut self) {
        for _ in 0..20 {
            // Of few items, many are new: a batch may have been drawn before the look.
            let items = Some(self.users.live_items()).filter(|&items| items > 500);
            self.users.items_before.set(items);
            self.stack.sleep(Duration::from_secs(1)).await;
            self.check_ratio();
        }
        self.users.items_before.set(None);
    }

    /// Compares frequencies of sampled items with their probabilities, without pushes and updates. Tables with a replay ratio are left out,
    /// whose limiter admits waiting pushes as learners sample, and tables whose items end or expire.
    async fn count_samples(&mut self) {
        let table = &self.users.table;
        if table.samples_per_insert > 0.0 || table.max_times_sampled > 0 || table.max_sample_lag > 0 {
            return;
        }
        self.users.still.set(true);
        // Steps and updates on their way, and batches that were prepared, are through.
        self.stack.sleep(Duration::from_secs(10)).await;
        self.users.ledger.count_samples();
        self.stack.sleep(Duration::from_secs(20)).await;
        self.users.ledger.check_frequencies();
        self.users.still.set(false);
    }

    /// The rate limiters keep to the ratio, within their slacks.
    fn check_ratio(&self) {
        let memories = self.users.machines.iter().filter_map(Machine::memory);
        let tables = memories.filter_map(|memory| memory.table(TABLE).ok());
        for table in tables {
            let stats = table.stats();
            let number = |name: &str| stats[name].as_f64().unwrap_or(0.0);
            let ratio = number("samples_per_insert");
            let (sampled, inserted) = (number("limiter_sampled"), number("limiter_inserted"));
            assert!(
                ratio == 0.0 || sampled <= ratio * inserted + number("slack") + 1.0,
                "{sampled} samples of {inserted} items, at {ratio} for each"
            );
        }
    }

    /// Each ended episode is an item, where none leaves the table.
    fn check_episodes(&self) {
        let TableConfig { capacity, max_times_sampled, max_sample_lag, .. } = self.users.table;
        let keeps =
            capacity == table().capacity && !self.users.removes && max_times_sampled == 0 && max_sample_lag == 0;
        for machine in self.users.machines.iter().filter(|_| self.users.whole && keeps) {
            let memory = machine.memory().expect("it runs");
            self.users.ledger.check_episodes(&memory, machine.live_items());
        }
        // The trial pushes single steps.
        self.users.ledger.expect_episodes(false);
    }

    /// The programs end.
    async fn end(&mut self) {
        self.users.end.set(true);
        self.wait(ENDING, "connections stay open", |story| {
            story.users.machines.iter().all(|one| one.connections() == 0)
        })
        .await;
    }

    /// One more program looks for one kind of mistake.
    async fn try_one(&mut self) {
        let ended = Rc::new(Cell::new(false));
        let (program, seed) = (self.stack.program(), self.seed());
        let mut trial = Trial::new(&program, &self.users, self.save_every, seed);
        process::start(&program, {
            let ended = ended.clone();
            move || {
                trial.run();
                ended.set(true);
            }
        });
        self.wait(TRIAL, "the trial does not end", |_| ended.get()).await;
        self.end().await;
    }

    async fn wait(&self, most: Duration, what: &str, done: impl Fn(&Self) -> bool) {
        let late = self.stack.now() + most;
        while !done(self) {
            assert!(self.stack.now() < late, "{what}");
            self.stack.sleep(Duration::from_secs(1)).await;
        }
    }

    /// Nothing is left.
    fn check_end(&self) {
        let memories: Vec<_> = self.users.machines.iter().filter_map(Machine::memory).collect();
        let memories: Vec<_> = memories.iter().map(|memory| &**memory).collect();
        self.users.ledger.check_end(&memories);
        for machine in &self.users.machines {
            let stats = machine.server().expect("it runs").service().stats();
            assert_eq!(stats["receive_bytes"], 0, "{stats:#}");
            assert_eq!(stats["reply_bytes"], 0, "{stats:#}");
            assert_eq!(stats["tables"]["steps"]["pinned_bytes"], 0, "{stats:#}");
            assert_eq!(stats["tables"]["steps"]["waiting_pushes"], 0, "{stats:#}");
            assert_eq!(stats["tables"]["steps"]["waiting_samples"], 0, "{stats:#}");
        }
    }
}

fn address(index: usize, stack: StackName) -> Address {
    Address::Tcp {
        tls: false,
        stack,
        // A server checks that its address is one of this machine.
        host: format!("127.0.0.{}", index + 1),
        port: 7710,
    }
}
