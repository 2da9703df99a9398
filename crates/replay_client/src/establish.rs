//! The first connection to a server, with retries. Errors that a restart, a limit of connections or a slow server can cause are retried;
//! all others are final.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use super::ConnectOptions;
use super::connection::Connection;
use super::dialer::Dialer;
use super::pipeline::{is_absent, is_busy, is_cut_off, is_timeout};
use super::retry::retry_for;
use base::system;
use base::wait::Wait;
use replay_link::error::{Error, Result};

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
