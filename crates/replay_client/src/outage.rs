//! Outages of servers: retries of the first connection and after broken ones; a final shutdown; and the identities of memories, since no two
//! servers may have copies of one. For a first connection, errors that a restart, a limit of connections or a slow server can cause are retried;
//! all others are final.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use serde_json::Value;

use base::system::{self, random_number};
use base::wait::{Wait, lock};
use replay_link::error::{Error, Result};
use replay_link::stack::Address;
use replay_wire::ErrorCode;

use super::connection::Connection;
use super::dialer::{ConnectOptions, Dialer};
use super::pipeline::{is_absent, is_broken, is_busy, is_closed, is_cut_off, is_timeout};

/// Outage of a server, shared by all calls of a client, so that it is logged once.
#[derive(Default)]
pub struct Outage(Mutex<OutageState>);

#[derive(Default)]
struct OutageState {
    /// Time of the first failed attempt.
    since: Option<Instant>,
    /// The outage was logged.
    logged: bool,
    /// Connections that calls used so far, new and idle ones.
    connections: u64,
    closed: bool,
}

impl Outage {
    /// Logs `error` once per outage. `longest` is the time for which the call retries.
    pub fn begin(&self, error: &Error, longest: Duration) {
        // Logs without the lock: logging may wait for Python's GIL, whose holder may wait for the lock.
        if lock(&self.0).begin(system::now()) {
            let seconds = longest.as_secs_f64();
            tracing::warn!("waiting up to {seconds}s for a server: {error}");
        }
    }

    /// Marks the server as closed for good.
    pub fn close(&self) {
        lock(&self.0).closed = true;
    }

    /// Ends an outage: a connection is open. `kept` describes a restarted server's data: see [`kept`].
    pub fn end(&self, address: &Address, kept: Option<&str>) {
        let outage = lock(&self.0).end();
        if let Some(since) = outage {
            let seconds = system::elapsed(since).as_secs();
            let kept = kept.map_or(String::new(), |kept| format!(": it was started again, {kept}"));
            tracing::warn!("{address} answers again after {seconds} s{kept}");
        }
    }

    /// Counts the use of an idle connection.
    pub fn used(&self) {
        lock(&self.0).connections += 1;
    }

    /// Connections that calls used so far, new and idle ones.
    pub fn connections(&self) -> u64 {
        lock(&self.0).connections
    }

    /// # Errors
    /// [`ErrorCode::Closed`] for a server that was closed for good.
    pub fn check(&self, address: &Address) -> Result<()> {
        match lock(&self.0).closed {
            true => {
                Err(Error::Remote { code: ErrorCode::Closed, message: format!("the server at {address} is closed") })
            }
            false => Ok(()),
        }
    }
}

impl OutageState {
    /// Records a failed attempt; returns whether to log the outage now. An outage of a server that has answered before is logged at once.
    /// Otherwise the server is probably still starting.
    fn begin(&mut self, now: Instant) -> bool {
        let since = *self.since.get_or_insert(now);
        let due = self.connections > 0 || now - since >= Wait::REPORT_AFTER;
        due && !std::mem::replace(&mut self.logged, true)
    }

    /// Records a connection; returns the start of the outage if it was logged.
    fn end(&mut self) -> Option<Instant> {
        self.connections += 1;
        self.closed = false;
        let since = self.since.take();
        since.filter(|_| std::mem::take(&mut self.logged))
    }
}

/// Data that a restarted server has kept, from its statistics.
pub fn kept(stats: &Value) -> String {
    match stats["snapshots"]["restored"]["tables"].as_object() {
        Some(tables) => {
            let steps: u64 = tables.values().filter_map(Value::as_u64).sum();
            format!("with {steps} steps of its snapshot")
        }
        None => "without a snapshot".to_owned(),
    }
}

/// Identities of the servers' memories, by address. The connections to all servers of a client share them.
#[derive(Default)]
pub struct MemoryIdentities(Mutex<BTreeMap<String, String>>);

impl MemoryIdentities {
    /// Records the memory of a server from its statistics.
    ///
    /// # Errors
    /// [`Error::CopiedMemory`] when another server has the same one: an item's id would name an item at each.
    pub fn note(&self, address: String, stats: &Value) -> Result<()> {
        let identity = stats["identity"].as_str().unwrap_or_default();
        let mut memories = lock(&self.0);
        memories.remove(&address);
        match memories.iter().find(|(_, known)| *known == identity) {
            Some((other, _)) => Err(Error::CopiedMemory { address, other: other.clone() }),
            None => {
                memories.insert(address, identity.to_owned());
                Ok(())
            }
        }
    }
}

/// Shortest and longest pause between attempts.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];

/// A shorter attempt that timed out says nothing about the server.
const ENOUGH: Duration = Duration::from_secs(1);

/// Retries `attempt` after a broken connection: at once, then after random pauses that double up to a second, until the caller's deadline,
/// or for [`ConnectOptions::reconnect_for`] after the break. Logs the outage from the second failure on. Does not
/// wait for a server that was closed for good.
///
/// # Errors
/// Error of the last attempt, or of an earlier, more informative one; [`Error::Interrupted`].
pub fn retry<T>(dialer: &Dialer, wait: &Wait<'_>, attempt: impl FnMut() -> Result<T>) -> Result<T> {
    retry_for(while_broken(dialer.options.reconnect_for), &mut None, dialer, wait, attempt)
}

/// Retries for `longest` after a broken connection, and not after other errors.
pub fn while_broken(longest: Duration) -> impl Fn(&Error) -> Option<Duration> {
    move |error| is_broken(error).then_some(longest)
}

/// [`retry`] with a time limit by error, `None` for final ones. `broken_since` is the time of the break, perhaps from an earlier call.
pub fn retry_for<T>(
    longest: impl Fn(&Error) -> Option<Duration>,
    broken_since: &mut Option<Instant>,
    dialer: &Dialer,
    wait: &Wait<'_>,
    mut attempt: impl FnMut() -> Result<T>,
) -> Result<T> {
    let mut pause = Duration::ZERO;
    let mut before = None;
    loop {
        let (begun, connections) = (system::now(), dialer.outage.connections());
        let error = match attempt() {
            Ok(done) => {
                *broken_since = None;
                return Ok(done);
            }
            Err(error) => error,
        };
        if is_closed(&error) {
            dialer.outage.close();
        }
        let now = system::now();
        // A new connection that lasted longer than the pause ended the outage, and its break begins another. Connections that break sooner
        // count as one outage.
        let held = dialer.outage.connections() != connections && now - begun > pause;
        let longest = longest(&error);
        if held || longest.is_none() {
            *broken_since = None;
        }
        let Some(longest) = longest else {
            return Err(error);
        };
        let until = broken_since.get_or_insert(now).checked_add(longest);
        let until = [until, wait.deadline].into_iter().flatten().min();
        let error = match before.take() {
            Some(before) if says_more(&before, &error, now - begun) => before,
            _ => error,
        };
        let left = until.map(|until| until.saturating_duration_since(now));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(error);
        }
        dialer.outage.check(&dialer.address)?;
        if !pause.is_zero() {
            dialer.outage.begin(&error, longest);
        }
        let [shortest, longest] = PAUSES;
        if is_busy(&error) {
            pause = pause.max(shortest);
        }
        wait.check()?;
        match left.filter(|_| !pause.is_zero()) {
            Some(left) if left < shortest => {
                sleep(left, wait)?;
                return Err(error);
            }
            // Shortens pauses near the deadline, so that the last attempt is close to it.
            left => sleep(jittered(pause).min(left.map_or(pause, |left| left * 3 / 4)), wait)?,
        }
        pause = (2 * pause).clamp(shortest, longest);
        before = Some(error);
    }
}

/// Whether the earlier error is more informative than that of the next attempt. A server at its limits may also close connections without a
/// reply, and the deadline may cut the last attempt short.
fn says_more(before: &Error, next: &Error, took: Duration) -> bool {
    let cut_short = is_timeout(next) && took < ENOUGH;
    (is_busy(before) && is_cut_off(next)) || (cut_short && !is_timeout(before))
}

/// Random pause between half of `pause` and all of it, which spreads the attempts of many clients.
fn jittered(pause: Duration) -> Duration {
    pause / 2 + (pause / 2).mul_f64(random_number() as f64 / u64::MAX as f64)
}

fn sleep(time: Duration, wait: &Wait<'_>) -> Result<()> {
    let end = system::now() + time;
    let mut slices = wait.slices(Some(end));
    loop {
        let now = system::now();
        if now >= end {
            return Ok(());
        }
        system::sleep(slices.next_wake(now)?.saturating_duration_since(now));
    }
}

/// Opens a connection. Retries until `until`, and as long as these `options` allow.
///
/// # Errors
/// Errors of [`Client::connect`](super::Client::connect), from the last attempt or an earlier, more informative one.
pub fn first_connection(
    dialer: &Dialer,
    options: &ConnectOptions,
    until: Option<Instant>,
    wait: &Wait<'_>,
) -> Result<Connection> {
    let begun = system::now();
    let longest = match options.connect_timeout.max(options.await_server) {
        Duration::ZERO => options.grace,
        longest => longest,
    };
    // The grace covers the server's answer, as in any call.
    let called = wait.deadline.and_then(|d| d.checked_add(options.grace));
    let ends = [begun.checked_add(longest), until, called];
    let end = ends.into_iter().flatten().min();
    let patient = Wait { deadline: [wait.deadline, until].into_iter().flatten().min(), ..*wait };
    // Start of the current series of attempts without an answer.
    let mut silent_since = None;
    let longest = |error: &Error| outage(options, error);
    retry_for(longest, &mut Some(begun), dialer, &patient, || {
        let since = *silent_since.get_or_insert_with(system::now);
        let dialed = dialer.dial_until(end, since, wait);
        if !dialed.as_ref().is_err_and(is_timeout) {
            silent_since = None;
        }
        dialed
    })
}

/// Time for retries after an error, from the first attempt; `None` for a final error.
fn outage(options: &ConnectOptions, error: &Error) -> Option<Duration> {
    if is_absent(error) {
        return Some(options.await_server);
    }
    let outage = is_busy(error) || is_cut_off(error) || is_timeout(error) || is_transient(error);
    outage.then_some(options.connect_timeout.max(options.await_server))
}

/// Transient failure of a connect call.
fn is_transient(error: &Error) -> bool {
    let transient = [
        ErrorKind::ConnectionReset,
        ErrorKind::ConnectionAborted,
        // The listen queue of a Unix socket is full.
        ErrorKind::WouldBlock,
        // Every local port is in use.
        ErrorKind::AddrNotAvailable,
    ];
    matches!(error, Error::Connect { source, .. } if transient.contains(&source.kind()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_server_that_was_started_again_has_kept_what_its_snapshot_had() {
        let stats = json!({"snapshots": {"restored": {"path": "a", "tables": {"s": 1, "t": 20}}}});
        assert_eq!(kept(&stats), "with 21 steps of its snapshot");
        for without in [json!({}), json!({"snapshots": {"restored": null}})] {
            assert_eq!(kept(&without), "without a snapshot");
        }
    }

    #[test]
    fn a_server_that_starts_is_named_after_a_while_and_one_that_breaks_off_at_once() {
        let mut state = OutageState::default();
        let start = Instant::now();
        assert!(!state.begin(start));
        assert_eq!(state.end(), None, "a quick start is not in the log");
        let mut state = OutageState::default();
        assert!(!state.begin(start));
        assert!(state.begin(start + Wait::REPORT_AFTER));
        assert!(!state.begin(start + 2 * Wait::REPORT_AFTER), "once");
        assert_eq!(state.end(), Some(start));
        assert!(state.begin(start), "its connection broke");
        assert_eq!(state.end(), Some(start));
        assert_eq!(state.end(), None);
    }

    #[test]
    fn a_copy_of_another_servers_memory_is_refused_with_both_names() {
        let memories = MemoryIdentities::default();
        let note =
            |name: &str, identity: &str| memories.note(name.to_owned(), &serde_json::json!({ "identity": identity }));
        for (name, identity) in [("innet://a", "1"), ("innet://b", "2"), ("innet://b", "2"), ("innet://a", "3")] {
            note(name, identity).unwrap();
        }
        let refused = note("innet://c", "2").unwrap_err().to_string();
        assert!(refused.starts_with("innet://b and innet://c have the same memory"), "{refused}");
        note("innet://c", "1").unwrap();
    }
}
