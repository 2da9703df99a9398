//! A world from its seed: settings, faults, quiet at the end.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_net::client::{Address, ConnectOptions};
use replay_net::config::ServerConfig;
use replay_net::stack::plugged::plug_in;
use replay_net::stack::{Stack, StackName};
use simulation::{Sim, SimStack};

use crate::client_stack::Simulated;
use crate::disk::{DiskFaults, SimDisk};
use crate::ledger::{Ledger, TABLE, table};
use crate::machine::Machine;
use crate::process;
use crate::programs::{self, Users};

/// Time after which the kernel ends a connection whose peer is silent.
const USER_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest pause of a program.
const PAUSE: Duration = Duration::from_secs(25);
/// Time for everybody to go on after the last fault: clients leave an absent server out for as long as it takes to find it again.
const RECOVERY: Duration = Duration::from_secs(180);
/// Time for the programs to end.
const ENDING: Duration = Duration::from_secs(600);

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
    plug_in(&Simulated);
    let options = ConnectOptions { program: 1, ..ConnectOptions::default() };
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
    machines: Vec<Machine>,
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
        let machines = (0..servers).map(|index| {
            let config = ServerConfig {
                listen: vec![address(index, StackName::Kernel)],
                max_bytes: 256 << 20,
                max_frame_bytes: 1 << 20,
                max_wait_ms: random.random_range(1_000..60_000),
                ..ServerConfig::default()
            };
            Machine::new(stack, index, config, SimDisk::new(random.random()), ledger)
        });
        let machines = machines.collect();
        let simulated = "sim".parse().expect("a stack that is plugged in");
        let users = Users {
            addresses: (0..servers).map(|index| address(index, simulated)).collect(),
            table: definition,
            ledger: ledger.clone(),
            options: ConnectOptions { push_window: random.random_range(1..32), ..options },
            removes,
            calm: Rc::default(),
            still: Rc::default(),
            end: Rc::default(),
            live_items: Rc::default(),
        };
        Story {
            stack: stack.clone(),
            save_every: Duration::from_secs(random.random_range(2..20)),
            random,
            machines,
            users,
            programs: Vec::new(),
            faults,
            next_seed: seed << 16,
        }
    }

    async fn tell(mut self) {
        for machine in &self.machines {
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
            let server = address(0, StackName::Kernel);
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

    async fn fault(&mut self) {
        match self.random.random_range(0..13) {
            0 | 1 => {
                let links = self.stack.links();
                if !links.is_empty() {
                    let link = &links[self.random.random_range(0..links.len())];
                    match self.random.random_bool(0.5) {
                        true => link.cut(),
                        false => link.cut_after_sent(self.random.random_range(0..500)),
                    }
                }
            }
            2 => self.partition(),
            3 => {
                let longest = [2, 50, 1_000][self.random.random_range(0..3)];
                self.stack.set_delay(Duration::ZERO..=Duration::from_millis(longest));
            }
            4 => self.stack.set_buffer([256, 4 << 10, 64 << 10][self.random.random_range(0..3)]),
            5 => self.restart(Machine::kill).await,
            6 => {
                for link in self.stack.links() {
                    // Peers of a machine without power get no end of their connections.
                    if self.machines.len() == 1 {
                        self.silence(link);
                    }
                }
                self.restart(Machine::lose_power).await;
            }
            7 => {
                let machine = self.machine();
                machine.disk().set_faults(DiskFaults {
                    failing: [0.0, 0.05, 0.5][self.random.random_range(0..3)],
                    capacity: [0, 0, 1 << 16][self.random.random_range(0..3)],
                    power_fails_after: self.random.random_bool(0.5).then(|| self.random.random_range(0..40)),
                });
            }
            8 => {
                let index = self.random.random_range(0..self.programs.len());
                let (program, role) = self.programs.swap_remove(index);
                self.stack.kill(&program);
                self.start(role);
            }
            9 => {
                let index = self.random.random_range(0..self.programs.len());
                let program = self.programs[index].0.clone();
                self.pause(program);
            }
            10 => {
                if let Some(program) = self.machine().program() {
                    self.pause(program);
                }
            }
            11 => {
                let seconds = [1, 30, 600][self.random.random_range(0..3)];
                self.stack.jump(Duration::from_secs(seconds));
            }
            _ => self.restart(Machine::shut_down).await,
        }
        self.power_failures().await;
    }

    /// Stops a program for a while.
    fn pause(&mut self, program: SimStack) {
        let time = self.random.random_range(Duration::ZERO..PAUSE);
        self.stack.pause(&program);
        let stack = self.stack.clone();
        self.stack.spawn(async move {
            stack.sleep(time).await;
            stack.resume(&program);
        });
    }

    fn machine(&mut self) -> Machine {
        self.machines[self.random.random_range(0..self.machines.len())].clone()
    }

    /// Nothing passes for a while on some links.
    fn partition(&mut self) {
        let share = self.random.random_range(0.1..1.0);
        for link in self.stack.links() {
            if !self.random.random_bool(share) {
                continue;
            }
            if self.random.random_bool(0.3) {
                self.silence(link);
                continue;
            }
            link.hold();
            let (stack, time) = (self.stack.clone(), self.random.random_range(0..20_000));
            self.stack.spawn(async move {
                stack.sleep(Duration::from_millis(time)).await;
                link.release();
            });
        }
    }

    /// A link that is dead without a word, until the kernel gives it up.
    fn silence(&self, link: simulation::SimLink) {
        link.hold();
        let stack = self.stack.clone();
        self.stack.spawn(async move {
            stack.sleep(USER_TIMEOUT).await;
            link.cut();
        });
    }

    /// Ends a server and starts it again.
    async fn restart(&mut self, end: fn(&Machine)) {
        let machine = self.machine();
        end(&machine);
        // Longer than any segment is on its way.
        let pause = Duration::from_millis(self.random.random_range(2_000..20_000));
        self.stack.sleep(pause).await;
        machine.kill();
        self.start_again(&machine).await;
    }

    async fn start_again(&mut self, machine: &Machine) {
        while !machine.start(self.save_every) {
            self.stack.sleep(Duration::from_secs(1)).await;
            machine.disk().set_faults(DiskFaults::default());
            if machine.disk().is_dead() {
                machine.disk().restart();
            }
        }
    }

    /// Machines whose power has failed in the middle of a save start again.
    async fn power_failures(&mut self) {
        for machine in self.machines.clone() {
            if machine.disk().is_dead() {
                machine.lose_power();
                self.stack.sleep(Duration::from_secs(3)).await;
                self.start_again(&machine).await;
            }
        }
    }

    /// The faults end; everybody goes on within a bound.
    async fn recover(&mut self) {
        self.users.calm.set(true);
        self.stack.set_delay(Duration::ZERO..=Duration::from_millis(2));
        self.stack.set_buffer(64 << 10);
        self.power_failures().await;
        for machine in &self.machines {
            machine.disk().set_faults(DiskFaults::default());
        }
        self.stack.sleep(USER_TIMEOUT).await;
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
            let memories = self.machines.iter().filter_map(Machine::memory);
            let stats = memories.map(|memory| memory.stats()["tables"][TABLE]["items"].as_u64());
            let live = stats.map(|items| items.expect("the table is there")).sum();
            // A batch may have been requested a second before it is looked at: of few items, many are new.
            self.users.live_items.set(Some(live).filter(|&live| live > 500));
            self.stack.sleep(Duration::from_secs(1)).await;
            self.check_ratio();
        }
        self.users.live_items.set(None);
    }

    /// Compares frequencies of sampled items with their probabilities, without pushes and updates. Tables with a replay ratio are left out:
    /// their limiter admits waiting pushes as learners sample.
    async fn count_samples(&mut self) {
        if self.users.table.samples_per_insert > 0.0 {
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
        let memories = self.machines.iter().filter_map(Machine::memory);
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

    /// The programs end, and nothing is left.
    async fn end(&mut self) {
        self.users.end.set(true);
        let late = self.stack.now() + ENDING;
        let connections = |machine: &Machine| {
            let server = machine.server().expect("it runs");
            server.service().stats()["server"]["connections"].as_u64()
        };
        while self.machines.iter().any(|machine| connections(machine) != Some(0)) {
            assert!(self.stack.now() < late, "connections stay open");
            self.stack.sleep(Duration::from_secs(1)).await;
        }
        let memories: Vec<_> = self.machines.iter().filter_map(Machine::memory).collect();
        let memories: Vec<_> = memories.iter().map(|memory| &**memory).collect();
        self.users.ledger.check_end(&memories);
        for machine in &self.machines {
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
