//! Retries of the first connection, and after broken ones. For the first one, errors that a restart, a limit of connections or a slow server
//! can cause are retried; all others are final.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use base::system::{self, random_number};
use base::wait::Wait;
use replay_link::error::{Error, Result};

use super::connection::Connection;
use super::dialer::{ConnectOptions, Dialer};
use super::pipeline::{is_absent, is_broken, is_busy, is_closed, is_cut_off, is_timeout};

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

/// Whether the earlier error is more informative than the next attempt's. A server at its limits may also close connections without a
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
