//! Trials: when the programs of a world have ended, one more program reaches for one kind of mistake, which faults at random times would
//! hide, or rarely meet.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use base::system;
use base::wait::Wait;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use replay_client::Client;
use replay_client::shards::ShardedClient;
use replay_core::memory::Memory;
use replay_core::replay::{ChangeLease, OpenWriter, PushChannel, Replay, SampleRequest, Sampled};
use replay_core::schema::{Sampler, TableConfig};
use replay_link::Commands;
use replay_link::error::{Error, Result};
use replay_wire::{ErrorCode, RequestBody};
use simulation::SimStack;

use crate::ledger::{TABLE, push_body, table};
use crate::process::{self, sleep};
use crate::programs::{Users, parameters, refuse_faults, within};

/// Table of a trial that needs one of its own.
const OWN: &str = "trial";
/// Steps of a writer before its first item, where a trial wants no items.
const NO_ITEMS: u16 = 50;

/// A trial.
pub struct Trial {
    /// Its program.
    stack: SimStack,
    users: Users,
    save_every: Duration,
    random: StdRng,
}

impl Trial {
    /// A trial of the program of `stack`.
    pub fn new(stack: &SimStack, users: &Users, save_every: Duration, seed: u64) -> Self {
        Trial { stack: stack.clone(), users: users.clone(), save_every, random: StdRng::seed_from_u64(seed) }
    }

    /// Makes one of the trials that this world has a place for.
    ///
    /// # Panics
    /// When a promise is broken.
    pub fn run(&mut self) {
        let mut trials: Vec<fn(&mut Trial)> =
            vec![Trial::take_over, Trial::put_again, Trial::restore, Trial::jump, Trial::empty, Trial::lease];
        if self.users.machines.len() > 1 {
            trials.push(Trial::burst);
        }
        let table = &self.users.table;
        if table.samples_per_insert > 0.0 || table.max_times_sampled > 0 {
            trials.extend([Trial::drain as fn(&mut Trial); 2]);
        }
        if table.parameters.is_some() {
            trials.extend([Trial::expire as fn(&mut Trial); 2]);
        }
        trials[self.random.random_range(0..trials.len())](self);
    }

    fn server(&mut self) -> usize {
        self.random.random_range(0..self.users.machines.len())
    }

    fn client(&self, server: usize) -> Client {
        let client = Client::connect(&self.users.addresses[server], self.users.options.clone(), &within(20));
        client.expect("the server answers")
    }

    fn memory(&self, server: usize) -> Arc<Memory> {
        self.users.machines[server].memory().expect("the server runs")
    }

    /// Replies end the connections of this program within their next bytes.
    fn cut_replies(&mut self, most: usize) {
        for link in self.stack.own_links() {
            link.cut_after_received(self.random.random_range(1..most));
        }
    }

    /// A second program takes a writer over, while a push of the first one is on its way: nothing of the first applies after that.
    fn take_over(&mut self) {
        let server = self.server();
        let (first, second) = (self.users.ledger.writer(), self.users.ledger.writer());
        let (clients, wait) = ([self.client(server), self.client(server)], within(60));
        let mut older = open(&clients[0], TABLE, first, NO_ITEMS, None);
        let link = self.stack.own_links().pop().expect("the writer's connection");
        let steps = self.random.random_range(1..8);
        self.users.ledger.sends(first, steps + 1);
        older.push(push_body(first, 0, steps as u32, NO_ITEMS), &wait).expect("it has room");
        older.flush(&wait).expect("no items, no limit");
        link.hold();
        older.push(push_body(first, steps, 1, NO_ITEMS), &wait).expect("it has room");
        let mut newer = open(&clients[1], TABLE, first, NO_ITEMS, None);
        link.release();
        let fenced = older.flush(&wait).expect_err("it is fenced off");
        assert_eq!(fenced.code(), ErrorCode::Fenced, "{fenced}");
        // The rows tell the programs apart; to the server they are one writer.
        self.users.ledger.sends(second, 1);
        let mut body = push_body(second, 0, 1, NO_ITEMS);
        body.chunks[0].first_step = steps;
        newer.push(body, &wait).and_then(|()| newer.close(&wait)).expect("it is the newest");
        let there = self.users.ledger.applied(&self.memory(server));
        assert_eq!([first, second].map(|writer| there.get(&writer)), [Some(&steps), Some(&1)]);
    }

    /// Puts whose replies are lost are stored once: each is one version, with its content.
    fn put_again(&mut self) {
        let server = self.server();
        let client = self.client(server);
        let mut version = self.memory(server).parameters().version("policy");
        for _ in 0..10 {
            let file = parameters(self.random.random());
            if self.random.random_bool(0.5) {
                self.cut_replies(60);
            }
            let put = client.put_parameters("policy", file.clone(), &within(60)).expect("it is sent again");
            version += 1;
            let got = client.get_parameters("policy", 0, None, &within(60)).expect("it is asked again");
            let got = got.expect("there are parameters");
            assert_eq!((put, got.version, got.bytes), (version, version, file));
        }
    }

    /// Items have the priorities of their last updates, also after a restart of their server.
    fn restore(&mut self) {
        let table = TableConfig {
            name: OWN.into(),
            priority_exponent: self.random.random_range(0.3..1.5),
            ..TableConfig { capacity: 100, ..table() }
        };
        let server = self.server();
        let client = self.client(server);
        client.create_table(&table, &within(20)).expect("it has room");
        self.push(&client, 100);
        let sample = || client.sample(OWN, &request(100), &within(60)).expect("there are items");
        let ids: Vec<_> = sample().items.iter().map(|item| item.id).collect();
        let priorities: BTreeMap<_, f64> = ids.iter().map(|&id| (id, self.random.random_range(10.0..1e3))).collect();
        let (ids, new): (Vec<_>, Vec<_>) = priorities.iter().map(|(id, priority)| (*id, *priority)).unzip();
        let receipt = client.update_priorities(OWN, &ids, &new, &within(20)).expect("they fit");
        assert_eq!(receipt.applied as usize, ids.len());
        let check = |sampled: &Sampled| {
            let known = sampled.items.iter().filter_map(|item| {
                let priority = priorities.get(&item.id)?;
                Some(item.probability / priority.powf(table.priority_exponent))
            });
            let known: Vec<_> = known.collect();
            for ratio in &known {
                let relative = ratio / known[0];
                assert!((relative - 1.0).abs() < 1e-4, "{relative} times the probability of its priority");
            }
        };
        check(&sample());
        self.restart(server);
        check(&sample());
        client.drop_table(OWN, &within(20)).expect("it is there");
    }

    /// A server is killed, and started again from its next snapshot.
    fn restart(&self, server: usize) {
        let machine = &self.users.machines[server];
        let saves = machine.saves();
        // One may be under way.
        while machine.saves() < saves + 2 {
            sleep(Duration::from_secs(1));
        }
        machine.kill();
        sleep(Duration::from_secs(3));
        assert!(machine.start(self.save_every), "its disk is in order");
    }

    /// Items of old versions leave at their draw, and no others. Versions are those of the steps, also after a restart of their server.
    fn expire(&mut self) {
        let samplers = [Sampler::Prioritized, Sampler::Uniform, Sampler::RankBased, Sampler::MinHeap];
        let table = TableConfig {
            name: OWN.into(),
            parameters: Some(OWN.into()),
            max_sample_lag: self.random.random_range(1..4),
            sampler: samplers[self.random.random_range(0..samplers.len())],
            ..TableConfig { capacity: 1_000, ..table() }
        };
        let server = self.server();
        let client = self.client(server);
        client.create_table(&table, &within(20)).expect("it has room");
        let (writer, wait) = (self.users.ledger.writer(), within(1_000));
        let mut channel = open(&client, OWN, writer, 0, None);
        let mut versions: Vec<u64> = Vec::new();
        let put =
            |random: &mut StdRng| client.put_parameters(OWN, parameters(random.random()), &wait).expect("it fits");
        let mut newest = put(&mut self.random);
        for round in 0..30 {
            if round == 15 {
                channel.close(&wait).expect("no limit");
                self.restart(server);
            }
            if self.random.random_bool(0.5) {
                newest = put(&mut self.random);
            }
            if round < 15 {
                let (first, rows) = (versions.len() as u64, self.random.random_range(1..8));
                let version = self.random.random_range(0..=newest);
                versions.extend((0..rows).map(|_| version));
                self.users.ledger.makes(writer, first, version);
                self.users.ledger.sends(writer, versions.len() as u64);
                let mut body = push_body(writer, first, rows, 0);
                body.chunks[0].version = version;
                channel.push(body, &wait).and_then(|()| channel.flush(&wait)).expect("it has room");
            }
            let (oldest, request) = (newest.saturating_sub(table.max_sample_lag.into()), request(20));
            match client.sample(OWN, &request, &within(2)) {
                Ok(sampled) => self.users.ledger.check_sample(&request, &sampled, None, Some(oldest)),
                // All have expired.
                Err(error) => assert_eq!(error.code(), ErrorCode::Deadline, "{error}"),
            }
            let stats = self.memory(server).table(OWN).expect("it was made").stats();
            let [items, expired] = ["items", "expired_items"].map(|name| stats[name].as_u64().expect("a counter"));
            assert_eq!(items + expired, versions.len() as u64, "{stats:#}");
            let young = versions.iter().filter(|&&version| version == 0 || version >= oldest).count() as u64;
            assert!(items >= young, "{young} items are young enough: {stats:#}");
        }
        client.drop_table(OWN, &within(20)).expect("it is there");
    }

    /// A clock that jumps ends no call whose answer is there.
    fn jump(&mut self) {
        let server = self.server();
        let (begun, end) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
        let caller = self.stack.program();
        process::start(&caller, {
            let (begun, end, writer) = (begun.clone(), end.clone(), self.users.ledger.writer());
            let (address, options) = (self.users.addresses[server].clone(), self.users.options.clone());
            move || {
                let client = Client::connect(&address, options, &within(20)).expect("the server answers");
                let mut channel = open(&client, TABLE, writer, NO_ITEMS, None);
                begun.set(true);
                while !end.get() {
                    let called = client.list(&within(20)).map(drop);
                    let called = called.and_then(|()| channel.push(Default::default(), &within(20)));
                    called.and_then(|()| channel.flush(&within(20))).expect("only the clock jumps");
                }
            }
        });
        // Its connections are open.
        while !begun.get() {
            sleep(Duration::from_millis(10));
        }
        let links = caller.own_links();
        for _ in 0..20 {
            self.stack.pause(&caller);
            // The answer to its call comes meanwhile.
            sleep(Duration::from_millis(100));
            self.stack.jump(Duration::from_secs([1, 30, 600][self.random.random_range(0..3)]));
            self.stack.resume(&caller);
            sleep(Duration::from_millis(self.random.random_range(1..50)));
        }
        // Those that were given up are counted, too, as `links` has them.
        assert_eq!(caller.own_links().len(), links.len(), "no connection is given up");
        end.set(true);
    }

    /// A push that waits for the rate limiter goes on once the table is empty, also if readers keep all of its steps.
    fn empty(&mut self) {
        let table = TableConfig {
            name: OWN.into(),
            samples_per_insert: 1.0,
            slack: 50.0,
            ..TableConfig { capacity: 1_000, ..table() }
        };
        let server = self.server();
        let client = self.client(server);
        client.create_table(&table, &within(20)).expect("it has room");
        // Less than a reply, so that replies wait on the server, with the steps.
        self.stack.set_buffer(256);
        for _ in 0..5 {
            let (writer, wait) = (self.users.ledger.writer(), within(60));
            let mut channel = open(&client, OWN, writer, 0, None);
            channel.push(push_body(writer, 0, 70, 0), &wait).and_then(|()| channel.flush(&wait)).expect("it has room");
            let mut reader = client.samples(OWN, request(2), 3).expect("a channel");
            reader.next(&wait).expect("there are items");
            channel.push(push_body(writer, 70, 1, 0), &wait).expect("it has room");
            // Not in the rhythm of retries.
            sleep(Duration::from_millis(self.random.random_range(200..300)));
            let stats = self.memory(server).table(OWN).expect("it was made").stats();
            assert_eq!(stats["waiting_pushes"], 1, "{stats:#}");
            client.command(RequestBody::EmptyTable(OWN.into()), &wait).expect("it is there");
            let emptied = system::now();
            channel.flush(&wait).expect("it is admitted");
            assert!(
                system::elapsed(emptied) < Wait::CHECK_EVERY / 5,
                "a push that is woken does not wait for its retry"
            );
            client.command(RequestBody::EmptyTable(OWN.into()), &wait).expect("it is there");
        }
        self.stack.set_buffer(64 << 10);
        client.drop_table(OWN, &within(20)).expect("it is there");
    }

    /// Probabilities count what one server has just got or lost, and what the others have.
    fn burst(&mut self) {
        let table =
            TableConfig { name: OWN.into(), priority_exponent: 0.0, ..TableConfig { capacity: 10_000, ..table() } };
        let client = ShardedClient::connect(&self.users.addresses, &self.users.options, &within(20));
        let client = client.expect("the servers answer");
        client.create_table(&table, &within(20)).expect("it has room");
        let mut sampler = client.samples(OWN, request(30), 0).expect("a channel");
        let mut live = vec![0; self.users.machines.len()];
        for burst in 0..10 {
            // The first bursts give every server an item.
            let server = match burst < self.users.machines.len() {
                true => burst,
                false => self.server(),
            };
            let (writer, rows) = (self.users.ledger.writer(), self.random.random_range(1..200));
            let mut channel = open(&client, OWN, writer, 0, Some(server as u32));
            channel.push(push_body(writer, 0, rows, 0), &within(20)).expect("it has room");
            channel.close(&within(20)).expect("no limit");
            live[server] += rows;
            let emptied = self.server();
            if emptied != server && self.random.random_bool(0.3) {
                let empty = RequestBody::EmptyTable(OWN.into());
                self.client(emptied).command(empty, &within(20)).expect("it is there");
                live[emptied] = 0;
            }
            let live: u32 = live.iter().sum();
            for item in sampler.next(&within(20)).expect("there are items").items {
                let relative = item.probability * f64::from(live);
                assert!((relative - 1.0).abs() < 1e-6, "{relative} times the probability of {live} equal items");
            }
        }
        drop(sampler);
        client.drop_table(OWN, &within(20)).expect("it is there");
    }

    /// Batches of which the server could not write all are not counted, by no limit.
    fn drain(&mut self) {
        for server in 0..self.users.machines.len() {
            let table = self.memory(server).table(TABLE).expect("it is there");
            let limiter_sampled = || table.stats()["limiter_sampled"].as_u64().expect("a counter");
            let (before, mut delivered) = (limiter_sampled(), 0);
            // Which samples of an item were delivered.
            let mut samples: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
            let client = self.client(server);
            let most = table.config().max_times_sampled;
            let mut drained = false;
            for _ in 0..300 {
                if self.random.random_bool(0.5) {
                    self.cut_replies(2_000);
                }
                let request = request(self.random.random_range(1..40));
                let sampled = match client.sample(TABLE, &request, &within(10)) {
                    Err(error) if error.code() == ErrorCode::Deadline => {
                        drained = true;
                        break;
                    }
                    // The reply at the deadline was cut.
                    Err(error) if error.code() == ErrorCode::Disconnected => continue,
                    sampled => sampled.expect("it is asked again"),
                };
                delivered += sampled.items.len() as u64;
                for item in &sampled.items {
                    samples.entry(item.id).or_default().push(item.times_sampled);
                }
            }
            drop(client);
            while self.users.machines[server].connections() > 0 {
                sleep(Duration::from_secs(1));
            }
            if table.config().samples_per_insert > 0.0 {
                assert_eq!(limiter_sampled() - before, delivered, "the limiter counts delivered samples");
            } else if drained {
                assert_eq!(table.stats()["items"], 0, "samples of the items are left");
            }
            for (id, mut times) in samples {
                times.sort_unstable();
                let first = times[0];
                assert!(times.iter().copied().eq(first..first + times.len() as u32), "samples {times:?} of item {id}");
                let is_last = most > 0 && drained && table.config().samples_per_insert == 0.0;
                assert!(!is_last || times.ends_with(&[most]), "samples {times:?} of {most} of item {id}");
            }
        }
    }

    /// Readers of a queue die, are cut off and are late: each item is acknowledged, and comes again only before that.
    fn lease(&mut self) {
        const PUSHES: u64 = 40;
        let table = TableConfig {
            name: OWN.into(),
            sampler: Sampler::Fifo,
            max_times_sampled: 1,
            queue_size: 20,
            ..TableConfig { capacity: 1_000, ..table() }
        };
        let server = self.server();
        let client = self.client(server);
        client.create_table(&table, &within(20)).expect("it has room");
        let readings = Rc::new(Readings::default());
        let mut readers = [(); 2].map(|()| self.start_reader(server, &readings));
        let writer = self.users.ledger.writer();
        let mut channel = open(&client, OWN, writer, 0, None);
        for push in 0..PUSHES {
            channel.push(push_body(writer, 5 * push, 5, 0), &within(300)).expect("readers go on");
            sleep(Duration::from_millis(self.random.random_range(0..400)));
            let reader = &mut readers[self.random.random_range(0..2)];
            match self.random.random_range(0..8) {
                0 => {
                    self.stack.kill(reader);
                    *reader = self.start_reader(server, &readings);
                }
                1 => reader.own_links().iter().for_each(|link| link.cut()),
                _ => {}
            }
        }
        channel.close(&within(300)).expect("readers go on");
        let (table, late) = (self.memory(server).table(OWN).expect("it was made"), Duration::from_secs(300));
        let begun = system::now();
        while table.stats()["items"] != 0 {
            assert!(system::elapsed(begun) < late, "items that no reader gets: {:#}", table.stats());
            sleep(Duration::from_secs(1));
        }
        readings.ended.set(true);
        assert_eq!(readings.delivered.borrow().len() as u64, 5 * PUSHES, "each item was delivered");
        assert_eq!(table.stats()["evicted_items"], 0);
        table.check_at_rest().expect("its counts agree");
        drop(table);
        client.drop_table(OWN, &within(20)).expect("it is there");
    }

    fn start_reader(&mut self, server: usize, readings: &Rc<Readings>) -> SimStack {
        let (program, seed, readings) = (self.stack.program(), self.random.random(), readings.clone());
        let (address, options) = (self.users.addresses[server].clone(), self.users.options.clone());
        process::start(&program, move || {
            let mut random = StdRng::seed_from_u64(seed);
            while !readings.ended.get() {
                let client = Client::connect(&address, options.clone(), &within(20));
                let read = client.and_then(|client| readings.read(&client, &mut random));
                if let Err(error) = read {
                    refuse_faults(&error);
                }
            }
        });
        program
    }

    /// Pushes steps that are items, with their default priorities, to the trial's own table.
    fn push(&self, client: &Client, rows: u32) {
        let writer = self.users.ledger.writer();
        let mut channel = open(client, OWN, writer, 0, None);
        channel.push(push_body(writer, 0, rows, 0), &within(20)).expect("it has room");
        channel.close(&within(20)).expect("no limit");
    }
}

/// What the readers of a queue have got.
#[derive(Default)]
struct Readings {
    ended: Cell<bool>,
    /// Ids of items that have reached a reader.
    delivered: RefCell<BTreeSet<u64>>,
    /// Ids of items that one has acknowledged.
    acknowledged: RefCell<BTreeSet<u64>>,
}

impl Readings {
    /// Reads a few batches, and acknowledges most of them.
    fn read(&self, client: &Client, random: &mut StdRng) -> Result<()> {
        let lease_ms = [300, SampleRequest::NO_END][random.random_range(0..2)];
        let request = SampleRequest { lease_ms, ..request(random.random_range(1..9)) };
        let mut channel = client.samples(OWN, request, random.random_range(0..3))?;
        for _ in 0..random.random_range(1..20) {
            if self.ended.get() {
                break;
            }
            let sampled = match channel.next(&within(2)) {
                Err(error) if error.code() == ErrorCode::Deadline => continue,
                sampled => sampled?,
            };
            let change = |begin| {
                let change = ChangeLease { lease: sampled.lease, begin };
                match client.change_lease(OWN, change, &within(20)) {
                    Err(error) if error.code() == ErrorCode::Lease => Ok(false),
                    changed => changed.map(|()| true),
                }
            };
            if !change(true)? {
                continue;
            }
            let ids: Vec<_> = sampled.items.iter().map(|item| item.id).collect();
            let again = ids.iter().filter(|id| self.acknowledged.borrow().contains(id)).count();
            assert_eq!(again, 0, "acknowledged items come again");
            self.delivered.borrow_mut().extend(&ids);
            sleep(Duration::from_millis(random.random_range(0..600)));
            if random.random_bool(0.8) && change(false)? {
                self.acknowledged.borrow_mut().extend(&ids);
            }
        }
        Ok(())
    }
}

/// A request for single steps of the trial's own table, fewer where there are fewer.
fn request(count: u32) -> SampleRequest {
    SampleRequest { count, allow_short: true, ..SampleRequest::default() }
}

fn open(
    replay: &dyn Replay<Error>,
    table: &str,
    writer: u64,
    window_before: u16,
    server: Option<u32>,
) -> Box<dyn PushChannel<Error>> {
    let open =
        OpenWriter { writer, name: format!("writer {writer}"), server, streams: 1, window_before, window_after: 0 };
    replay.open_writer(table, open, &within(30)).expect("the server answers")
}
