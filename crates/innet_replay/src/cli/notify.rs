//! Messages to systemd about the state of the server (`sd_notify(3)`); without the environment variable NOTIFY_SOCKET there are none.

use std::time::Duration;

use sd_notify::NotifyState;

/// Time that a start or an end may take after each message, whatever the unit's limit.
const EXTENSION: Duration = Duration::from_secs(30);

/// Extends the time of a start or an end.
pub const EXTEND: NotifyState<'_> = NotifyState::ExtendTimeoutUsec(EXTENSION.as_micros() as u32);

/// Interval of messages: a third of the extension, or half of the watchdog's time.
pub fn interval() -> Duration {
    let watchdog = sd_notify::watchdog_enabled().map(|time| (time / 2).max(Duration::from_millis(1)));
    watchdog.into_iter().chain([EXTENSION / 3]).fold(Duration::MAX, Duration::min)
}

/// Sends a message.
pub fn tell(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "systemd does not hear of the state of this server (NOTIFY_SOCKET)");
    }
}

/// Announces a reload; [`NotifyState::Ready`] follows once it is done.
pub fn tell_reloading() {
    // An error means that the machine has no monotonic clock.
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        tell(&[NotifyState::Reloading, now]);
    }
}
