//! A machine of the world with a server: its disk stays when the server is killed or the power fails.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use replay_core::memory::{Memory, MemoryLimits};
use replay_link::stack::{Address, Stack};
use replay_server::config::ServerConfig;
use replay_server::server::Server;
use simulation::SimStack;

use crate::disk::SimDisk;
use crate::ledger::{Ledger, TABLE};
use crate::process;

/// A server's machine.
#[derive(Clone)]
pub struct Machine(Rc<State>);

struct State {
    /// The world's own stack, from which programs are started.
    world: SimStack,
    address: Address,
    config: ServerConfig,
    disk: SimDisk,
    ledger: Ledger,
    index: usize,
    running: RefCell<Option<Running>>,
    /// Steps that the complete snapshots have, by writer, the newest last.
    saved: RefCell<Vec<BTreeMap<u64, u64>>>,
    /// Writers that had steps here when a server ended.
    writers: RefCell<BTreeSet<u64>>,
    starts: Cell<u64>,
    saves: Cell<u64>,
}

struct Running {
    stack: SimStack,
    server: Arc<Server>,
    memory: Arc<Memory>,
}

/// Folder of the snapshots.
const FOLDER: &str = "/snapshots";

impl Machine {
    /// A machine whose server is not running yet.
    pub fn new(world: &SimStack, index: usize, config: ServerConfig, disk: SimDisk, ledger: &Ledger) -> Self {
        Machine(Rc::new(State {
            world: world.clone(),
            address: config.listen[0].clone(),
            config,
            disk,
            ledger: ledger.clone(),
            index,
            running: RefCell::new(None),
            saved: RefCell::default(),
            writers: RefCell::default(),
            starts: Cell::new(0),
            saves: Cell::new(0),
        }))
    }

    /// Its disk.
    pub fn disk(&self) -> &SimDisk {
        &self.0.disk
    }

    /// Memory of the running server.
    pub fn memory(&self) -> Option<Arc<Memory>> {
        self.0.running.borrow().as_ref().map(|running| running.memory.clone())
    }

    /// Live items of the running server.
    ///
    /// # Panics
    /// When it lacks the table.
    pub fn live_items(&self) -> u64 {
        self.memory().map_or(0, |memory| {
            let stats = memory.table(TABLE).expect("the table is there").stats();
            stats["items"].as_u64().expect("a number of items")
        })
    }

    /// Stack of the running server's program.
    pub fn program(&self) -> Option<SimStack> {
        self.0.running.borrow().as_ref().map(|running| running.stack.clone())
    }

    /// The running server.
    pub fn server(&self) -> Option<Arc<Server>> {
        self.0.running.borrow().as_ref().map(|running| running.server.clone())
    }

    /// Open connections of the running server.
    ///
    /// # Panics
    /// When it does not run.
    pub fn connections(&self) -> u64 {
        self.server_counter("connections")
    }

    fn server_counter(&self, name: &str) -> u64 {
        let stats = self.server().expect("it runs").service().stats();
        stats["server"][name].as_u64().expect("a counter")
    }

    /// Starts the server; `false` if the disk refuses.
    pub fn start(&self, save_every: Duration) -> bool {
        let state = &self.0;
        let stack = state.world.program();
        state.starts.set(state.starts.get() + 1);
        let seed = state.index as u64 * 1000 + state.starts.get();
        let memory = Memory::new(MemoryLimits { seed: Some(seed), ..state.config.memory_limits() });
        let server = match Server::new(&state.config, memory.clone()) {
            Ok(server) => server,
            Err(error) => panic!("{error}"),
        };
        let disk = Box::new(state.disk.clone());
        if let Err(error) = server.restore_from(disk, Path::new(FOLDER)) {
            // A failing disk: the service manager tries again. Only such errors are allowed.
            let text = error.to_string();
            assert!(
                text.contains("input/output error")
                    || text.contains("power has failed")
                    || text.contains("no storage space"),
                "{text}"
            );
            state.disk.release();
            return false;
        }
        let (saved, writers) = (state.saved.borrow(), state.writers.borrow());
        state.ledger.restarted(&memory, &writers, saved.last().unwrap_or(&BTreeMap::new()));
        drop((saved, writers));
        let server = Arc::new(server);
        let listener = stack.listen(&state.address).expect("a free address");
        stack.spawn(server.clone().run(stack.clone(), vec![listener], vec![]));
        process::start(&stack, {
            let (machine, server) = (self.clone(), server.clone());
            move || machine.save(&server, save_every)
        });
        *state.running.borrow_mut() = Some(Running { stack, server, memory });
        true
    }

    /// Saves snapshots at intervals.
    fn save(&self, server: &Server, every: Duration) {
        loop {
            process::sleep(every);
            let acknowledged = self.0.ledger.acknowledgements();
            let snapshots = server.service().snapshots().expect("it saves snapshots");
            if snapshots.save().is_ok() {
                let there = self.0.ledger.applied(&server.service().memory);
                let own = acknowledged.into_iter().filter(|(writer, _)| there.contains_key(writer));
                let mut saved = self.0.saved.borrow_mut();
                saved.push(own.collect());
                // A server keeps two.
                let older = saved.len().saturating_sub(2);
                saved.drain(..older);
                self.0.saves.set(self.0.saves.get() + 1);
            }
        }
    }

    /// Complete snapshots so far.
    pub fn saves(&self) -> u64 {
        self.0.saves.get()
    }

    /// Flips a bit of the newest snapshot, if there is a whole one before it. Only while the server does not run.
    pub fn damage_snapshot(&self) {
        let mut saved = self.0.saved.borrow_mut();
        if saved.len() > 1 {
            self.0.disk.flip(".snapshot");
            saved.pop();
        }
    }

    /// Kills the server's process.
    ///
    /// # Panics
    /// When something keeps its memory.
    pub fn kill(&self) {
        let Some(running) = self.0.running.borrow_mut().take() else {
            return;
        };
        let here = self.0.ledger.applied(&running.memory);
        self.0.writers.borrow_mut().extend(here.into_keys());
        let memory: Weak<Memory> = Arc::downgrade(&running.memory);
        self.0.world.kill(&running.stack);
        self.0.disk.release();
        drop(running);
        assert_eq!(memory.strong_count(), 0, "nothing keeps the memory of a killed server");
    }

    /// The power of the machine fails.
    pub fn lose_power(&self) {
        self.kill();
        self.0.disk.restart();
    }

    /// Ends the server as Ctrl-C does.
    pub fn shut_down(&self) {
        if let Some(server) = self.server() {
            server.shut_down();
        }
    }
}
