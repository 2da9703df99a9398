//! The servers of one memory: which of them answer, and how a server that returns is brought up to date.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use base::system::{self, random_number};
use base::wait::{Wait, lock};
use replay_core::replay::{Replay, SampledItem, ShareState};
use replay_core::schema::TableConfig;
use replay_core::table::ids::IdSpace;
use replay_link::error::{Error, Result};
use replay_wire::ErrorCode;

use super::super::Client;
use super::super::dialer::Dialer;
use super::super::pipeline::{is_broken, is_closed};

/// One server of the memory.
pub struct Shard {
    /// Client of the server, whose calls retry a broken connection only once.
    pub client: Arc<Client>,
    /// The server does not answer. Relaxed accesses: a call that reads a stale value fails, or leaves the server out once more.
    away: AtomicBool,
}

/// All servers of the memory.
pub struct Group {
    /// In the order of the addresses.
    pub shards: Vec<Shard>,
    /// Servers by the table number in their ids. Tables of two servers may share a number; the rest of an id then differs.
    numbers: Mutex<HashMap<u16, Vec<usize>>>,
    /// Newest versions of the parameters, by name.
    pub versions: Mutex<BTreeMap<String, u64>>,
    /// Server from which parameters are read unless a writer asks: chosen at random for each client.
    pub own: usize,
    /// Longest time for which a sample waits while no server answers.
    pub reconnect_for: Duration,
}

/// Pause between two attempts to reach an absent server.
const RETRY_AFTER: Duration = Duration::from_millis(500);
/// Time limit of one attempt.
const RETRY_FOR: Duration = Duration::from_secs(5);

impl Group {
    pub fn new(clients: Vec<Client>, reconnect_for: Duration) -> Self {
        let own = (random_number() % clients.len() as u64) as usize;
        let shards = clients.into_iter().map(|client| Shard { client: Arc::new(client), away: AtomicBool::new(false) });
        Group { shards: shards.collect(), numbers: Mutex::default(), versions: Mutex::default(), own, reconnect_for }
    }

    /// All addresses, for messages.
    pub fn names(&self) -> String {
        let names = self.shards.iter().map(|shard| shard.name());
        names.collect::<Vec<_>>().join(", ")
    }

    pub fn is_away(&self, shard: usize) -> bool {
        self.shards[shard].away.load(Ordering::Relaxed)
    }

    /// # Errors
    /// [`Error::Config`] in a forked child of the process that connected.
    pub fn check_process(&self) -> Result<()> {
        let first = self.shards.first();
        first.map_or(Ok(()), |shard| shard.client.dialer.check_process())
    }

    /// The servers that answer.
    pub fn present(&self) -> impl Iterator<Item = usize> {
        (0..self.shards.len()).filter(|&shard| !self.is_away(shard))
    }

    /// Error if no server answers.
    pub fn none_answers(&self) -> Error {
        Error::Disconnected { address: self.names(), reason: "none of these servers answers".to_owned() }
    }

    /// Leaves a server out until it answers again. Logs the absence once, and starts a thread that waits for the server.
    pub fn leave(self: &Arc<Self>, shard: usize, error: &Error) {
        if self.shards[shard].away.swap(true, Ordering::Relaxed) {
            return;
        }
        tracing::warn!(
            "{} is away, and its items are not sampled until it answers again: {error}",
            self.shards[shard].name()
        );
        let group = Arc::downgrade(self);
        let since = system::now();
        let started = system::spawn("innet-shard", move || await_return(&group, shard, since));
        if let Err(error) = started {
            // The next call tries the server again.
            self.shards[shard].away.store(false, Ordering::Relaxed);
            tracing::error!("cannot start a thread that waits for a server: {error}");
        }
    }

    /// Result of a call to one server; `None` if the server does not answer, which leaves it out from now on.
    ///
    /// # Errors
    /// An error of the server, with its address.
    pub fn answered<T>(self: &Arc<Self>, shard: usize, result: Result<T>) -> Result<Option<T>> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error) if is_lost(&error) => {
                self.leave(shard, &error);
                Ok(None)
            }
            Err(error) => Err(self.shards[shard].named(error)),
        }
    }

    /// Calls the present servers one after the other.
    ///
    /// # Errors
    /// The first error of a server that answers; [`Error::Disconnected`] if none does.
    pub fn each<T>(self: &Arc<Self>, ask: impl Fn(&Client) -> Result<T>) -> Result<Vec<(usize, T)>> {
        let mut answers = Vec::new();
        for shard in self.present() {
            if let Some(answer) = self.answered(shard, ask(&self.shards[shard].client))? {
                answers.push((shard, answer));
            }
        }
        match answers.is_empty() {
            true => Err(self.none_answers()),
            false => Ok(answers),
        }
    }

    /// Calls the present servers in turn, beginning at `first`, until one answers.
    ///
    /// # Errors
    /// The error of a server that answers; [`Error::Disconnected`] if none does.
    pub fn any<T>(self: &Arc<Self>, first: usize, ask: impl Fn(&Client) -> Result<T>) -> Result<T> {
        let count = self.shards.len();
        for shard in (0..count).map(|offset| (first + offset) % count) {
            if self.is_away(shard) {
                continue;
            }
            if let Some(answer) = self.answered(shard, ask(&self.shards[shard].client))? {
                return Ok(answer);
            }
        }
        Err(self.none_answers())
    }

    /// Records the server of ids, by the number of its table and by earlier numbers of restored items.
    pub fn note_numbers(&self, shard: usize, state: ShareState, items: &[SampledItem]) {
        let mut numbers = lock(&self.numbers);
        let restored = items.iter().map(|item| IdSpace::number_of(item.id));
        let mut last = None;
        for number in std::iter::once(state.number).chain(restored) {
            if last.replace(number) == Some(number) {
                continue;
            }
            let shards = numbers.entry(number).or_default();
            if !shards.contains(&shard) {
                shards.push(shard);
            }
        }
    }

    /// The servers whose table may have an id of this number.
    pub fn of_number(&self, number: u16) -> Vec<usize> {
        lock(&self.numbers).get(&number).cloned().unwrap_or_default()
    }

    /// Creates missing tables at a server that has returned, and copies newer parameters to it.
    fn take_up(&self, shard: usize) -> Result<()> {
        let wait = Wait::until(Some(system::now() + RETRY_FOR));
        let client = &self.shards[shard].client;
        let here = client.list(&wait)?;
        let Some(other) = self.present().find(|&other| other != shard) else {
            return Ok(());
        };
        let other = &self.shards[other].client;
        let mut there = other.list(&wait)?;
        let known = |table: &TableConfig| here.tables.iter().any(|known| known.name == table.name);
        if !there.tables.iter().all(known) {
            // A table that is missing may be on its way out: it is dropped at one server after the other.
            system::sleep(RETRY_AFTER);
            there = other.list(&wait)?;
        }
        complete(client, &here.tables, &there.tables, &wait)?;
        for listed in there.parameters {
            let known = here.parameters.iter().find(|p| p.name == listed.name);
            if known.is_none_or(|known| known.version < listed.version)
                && let Some(newest) = other.get_parameters(&listed.name, 0, None, &wait)?
            {
                let version = newest.version;
                let put = client.put_version(&listed.name, 0, version, newest.bytes, &wait);
                allowed(put.map(drop))?;
            }
        }
        Ok(())
    }
}

impl Shard {
    /// Address, for messages.
    pub fn name(&self) -> String {
        self.client.address().to_string()
    }

    /// Adds the address to a server's error.
    pub fn named(&self, error: Error) -> Error {
        at(&self.name(), error)
    }
}

/// Adds `name` to an error of the server.
pub fn at(name: &str, error: Error) -> Error {
    let here = |text: String| match text.contains(name) {
        true => text,
        false => format!("{name}: {text}"),
    };
    match error {
        Error::Remote { code, message } => Error::Remote { code, message: here(message) },
        Error::RemoteDeadline { waited_for } => {
            let waited_for = waited_for.map(|sentence| format!("{name}: {sentence}"), str::to_owned);
            Error::RemoteDeadline { waited_for: Box::new(waited_for) }
        }
        Error::Wire(replay_wire::Error::Authentication(reason)) => Error::authentication(here(reason)),
        Error::Wire(replay_wire::Error::Protocol(reason)) => Error::protocol(here(reason)),
        Error::Config(reason) => Error::Config(here(reason)),
        error => error,
    }
}

/// Calls a server for at most the grace; `None` if the grace ended the call before the caller's deadline.
pub fn within_grace<T>(
    dialer: &Dialer,
    wait: &Wait<'_>,
    call: impl FnOnce(&Wait<'_>) -> Result<T>,
) -> Result<Option<T>> {
    let grace = system::now() + dialer.options.grace;
    let deadline = Some(wait.deadline.map_or(grace, |deadline| deadline.min(grace)));
    match call(&Wait { deadline, ..*wait }) {
        Err(Error::Deadline { .. }) if deadline == Some(grace) => Ok(None),
        called => called.map(Some),
    }
}

/// Asks a question that a server answers at once. A server without an answer for the grace is lost.
///
/// # Errors
/// [`Error::Disconnected`] after the grace; errors of the call.
pub fn ask_promptly<T>(client: &Client, wait: &Wait<'_>, ask: impl FnOnce(&Wait<'_>) -> Result<T>) -> Result<T> {
    within_grace(&client.dialer, wait, ask)?.ok_or_else(|| silent(&client.dialer))
}

/// Error of a server without an answer for the grace.
pub fn silent(dialer: &Dialer) -> Error {
    let grace = dialer.options.grace.as_secs_f64();
    Error::Disconnected { address: dialer.address.to_string(), reason: format!("no answer for {grace} s") }
}

/// Creates the tables of `there` that are missing in `here`. Skips tables that an actor's token may not create: a learner's client creates
/// them.
///
/// # Errors
/// [`replay_core::Error::TableDiffers`] if a definition differs; errors of the calls.
pub fn complete(client: &Client, here: &[TableConfig], there: &[TableConfig], wait: &Wait<'_>) -> Result<()> {
    for table in there {
        match here.iter().find(|known| known.name == table.name) {
            None => allowed(client.create_table(table, wait))?,
            Some(known) => known.check_same(table)?,
        }
    }
    Ok(())
}

/// Ignores the error of a request that the client's role does not allow.
fn allowed(result: Result<()>) -> Result<()> {
    match result {
        Err(error) if error.code() == ErrorCode::Forbidden => Ok(()),
        result => result,
    }
}

/// Tries to reach a server until it answers, or until the client is dropped.
fn await_return(group: &Weak<Group>, shard: usize, since: Instant) {
    let mut refused = false;
    loop {
        system::sleep(RETRY_AFTER);
        let Some(group) = group.upgrade() else { return };
        let name = group.shards[shard].name();
        match group.take_up(shard) {
            Ok(()) => {
                group.shards[shard].away.store(false, Ordering::Relaxed);
                // Copies parameters that were put in between. If this fails, the next put makes up for it.
                let _ = group.take_up(shard);
                let seconds = system::elapsed(since).as_secs();
                tracing::warn!("{name} answers again after {seconds} s, and is sampled again");
                return;
            }
            Err(error) if is_lost(&error) && !matches!(error, Error::CopiedMemory { .. }) => {}
            Err(error) if error.code() == ErrorCode::Deadline => {}
            Err(error) => {
                if !std::mem::replace(&mut refused, true) {
                    tracing::error!("{name} answers again, but cannot be used: {error}");
                }
            }
        }
    }
}

/// The server does not answer, or was closed.
pub fn is_lost(error: &Error) -> bool {
    is_broken(error) || is_closed(error)
}
