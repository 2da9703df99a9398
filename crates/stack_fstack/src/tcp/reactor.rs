//! The reactor: tasks, timers and events, run by F-Stack's loop on its own thread.
//!
//! One turn reads socket events (`ff_kevent`, which never waits), runs submissions of other threads, fires timers, and
//! polls woken tasks. F-Stack calls a turn after received packets, and every `pkt_tx_delay` µs without any.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use fstack_sys::fstack as ff;
use futures_util::future::{FutureExt as _, LocalBoxFuture};
use futures_util::stream::{FuturesUnordered, Stream as _};

use super::readiness::{Direction, Sockets};

/// F-Stack's sockets, on the reactor thread.
#[derive(Debug, Clone, Copy)]
pub struct Fstack(pub(super) ());

/// Limit of events read in one turn; further ones stay in the queue.
const EVENTS: usize = 64;

const NO_EVENT: ff::kevent =
    ff::kevent { ident: 0, filter: 0, flags: 0, fflags: 0, data: 0, udata: ptr::null_mut(), ext: [0; 4] };

/// Turns between two clock readings, which are slower than the rest of an idle turn. Timers are late by up to this many turns: microseconds
/// when polling, a millisecond when the loop sleeps.
const CLOCK_EVERY: u32 = 16;

/// Limit of polling rounds in one turn: a task that always wakes itself must not delay packets.
const ROUNDS: usize = 16;

/// Time for the loop to send socket buffers after the last task.
const LAST_SENDS: Duration = Duration::from_millis(20);

/// A call to run on the reactor thread.
pub type Submission = Box<dyn FnOnce(&Rc<Reactor>) + Send>;

/// Set when any task is woken.
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Release: synchronizes with the acquire swap in `run_tasks`, which then sees the task in its queue.
        self.0.store(true, Ordering::Release);
    }
}

thread_local! {
    static HERE: RefCell<Option<Rc<Reactor>>> = const { RefCell::new(None) };
}

/// State of the reactor thread. A reference to it proves that the current thread may call F-Stack.
pub struct Reactor {
    queue: c_int,
    events: RefCell<[ff::kevent; EVENTS]>,
    /// Readiness of the sockets.
    pub(super) sockets: RefCell<Sockets>,
    tasks: RefCell<FuturesUnordered<LocalBoxFuture<'static, ()>>>,
    spawned: RefCell<Vec<LocalBoxFuture<'static, ()>>>,
    woken: Arc<Woken>,
    waker: Waker,
    timers: RefCell<BTreeMap<(Instant, u64), Waker>>,
    next_timer: Cell<u64>,
    turns: Cell<u32>,
    /// Tasks that have used up their write quota of this turn.
    next_turn: RefCell<Vec<Waker>>,
    submissions: mpsc::Receiver<Submission>,
    /// Time at which the loop ends, once asked to stop.
    end: Cell<Option<Instant>>,
    panicked: Cell<bool>,
}

impl Reactor {
    /// Makes the reactor of this thread.
    ///
    /// # Safety
    /// F-Stack was initialised on this thread, and its loop has not run yet.
    pub(super) unsafe fn enter(submissions: mpsc::Receiver<Submission>) -> io::Result<Rc<Self>> {
        // SAFETY: by the contract of this function, on F-Stack's thread.
        let queue = check(unsafe { ff::ff_kqueue() })?;
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        let reactor = Rc::new(Reactor {
            queue,
            events: RefCell::new([NO_EVENT; EVENTS]),
            sockets: RefCell::default(),
            tasks: RefCell::default(),
            spawned: RefCell::default(),
            waker: woken.clone().into(),
            woken,
            timers: RefCell::default(),
            next_timer: Cell::new(0),
            turns: Cell::new(0),
            next_turn: RefCell::default(),
            submissions,
            end: Cell::new(None),
            panicked: Cell::new(false),
        });
        HERE.with(|here| *here.borrow_mut() = Some(reactor.clone()));
        Ok(reactor)
    }

    /// Calls `work` with the reactor of this thread; `None` on any other thread, and after the loop has ended.
    pub fn with<T>(work: impl FnOnce(&Rc<Reactor>) -> T) -> Option<T> {
        let here = HERE.try_with(|here| here.borrow().clone()).ok().flatten();
        here.map(|reactor| work(&reactor))
    }

    /// [`Reactor::with`] for an operation on a socket.
    pub(super) fn for_socket<T>(work: impl FnOnce(&Rc<Reactor>) -> io::Result<T>) -> io::Result<T> {
        Self::with(work).unwrap_or_else(|| Err(off_thread()))
    }

    /// Runs F-Stack's loop until it is asked to stop. Returns whether it ended by a panic or an error of the reactor.
    pub(super) fn run(self: Rc<Self>) -> bool {
        let state: *const Reactor = Rc::as_ptr(&self);
        // SAFETY: `self` exists, so this is F-Stack's thread; it outlives the loop.
        unsafe { ff::ff_run(turn, state.cast_mut().cast()) };
        // From here on sockets fail, and submissions are refused.
        HERE.with(|here| here.borrow_mut().take());
        self.panicked.get()
    }

    /// Runs `task` on this thread until it completes or the reactor ends. A panic, which the panic hook prints, ends only this task.
    pub fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        self.spawned.borrow_mut().push(AssertUnwindSafe(task).catch_unwind().map(drop).boxed_local());
    }

    /// Starts watching a socket. F-Stack also reports data that arrived before.
    pub(super) fn register(&self, fd: c_int, ready: bool) -> io::Result<()> {
        self.sockets.borrow_mut().insert(fd, ready);
        self.watch(fd, Direction::Read).inspect_err(|_| self.sockets.borrow_mut().forget(fd))
    }

    /// Asks F-Stack for an event when the socket is ready.
    fn watch(&self, fd: c_int, direction: Direction) -> io::Result<()> {
        match self.sockets.borrow_mut().direction(fd, direction) {
            Some(side) if !side.watched => side.watched = true,
            _ => return Ok(()),
        }
        let (filter, flags) = match direction {
            Direction::Read => (ff::EVFILT_READ, ff::EV_CLEAR),
            Direction::Write => (ff::EVFILT_WRITE, ff::EV_ONESHOT),
        };
        // Not null, which F-Stack treats as no value.
        let udata = ptr::dangling_mut();
        let change = ff::kevent { ident: fd as usize, filter, flags: ff::EV_ADD | flags, udata, ..NO_EVENT };
        // SAFETY: on the reactor thread; one change, and a null event list with capacity 0.
        let changed = unsafe { ff::ff_kevent(self.queue, &raw const change, 1, ptr::null_mut(), 0, ptr::null()) };
        check(changed).map(drop)
    }

    /// Calls `operation` if the socket is ready. If it is not ready or would block, registers the task for the next event.
    pub(super) fn poll_socket<T>(
        &self,
        fd: c_int,
        direction: Direction,
        context: &mut Context<'_>,
        mut operation: impl FnMut() -> io::Result<T>,
    ) -> Poll<io::Result<T>> {
        if !self.sockets.borrow_mut().is_ready(fd, direction) {
            return self.wait_for(fd, direction, context);
        }
        loop {
            match operation() {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.sockets.borrow_mut().blocks(fd, direction);
                    return self.wait_for(fd, direction, context);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => return Poll::Ready(done),
            }
        }
    }

    /// Bytes that the socket may still write in this turn. At 0, wakes the task in the next turn.
    pub(super) fn write_quota(&self, fd: c_int, context: &Context<'_>) -> usize {
        let mut sockets = self.sockets.borrow_mut();
        let left = sockets.write_quota(fd, self.turns.get());
        if left == 0 {
            let waker = context.waker().clone();
            self.next_turn.borrow_mut().push(waker);
        }
        left
    }

    pub(super) fn wrote(&self, fd: c_int, count: usize) {
        let mut sockets = self.sockets.borrow_mut();
        sockets.wrote(fd, self.turns.get(), count);
    }

    fn wait_for<T>(&self, fd: c_int, direction: Direction, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        match self.sockets.borrow_mut().direction(fd, direction) {
            Some(side) => side.wake_later(context.waker()),
            None => return Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
        match self.watch(fd, direction) {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    fn read_events(&self) -> io::Result<()> {
        let mut events = self.events.borrow_mut();
        let capacity = events.len() as c_int;
        // SAFETY: on the reactor thread; `events` has memory for `capacity` events.
        let count =
            check(unsafe { ff::ff_kevent(self.queue, ptr::null(), 0, events.as_mut_ptr(), capacity, ptr::null()) })?;
        for event in events.iter().take(count as usize) {
            let direction = match event.filter {
                ff::EVFILT_READ => Direction::Read,
                _ => Direction::Write,
            };
            let ended = event.flags & ff::EV_EOF != 0;
            let bytes = event.data.try_into().unwrap_or(0);
            let waker = self.sockets.borrow_mut().event(event.ident as c_int, direction, bytes, ended);
            waker.into_iter().for_each(Waker::wake);
        }
        Ok(())
    }

    fn fire_timers(&self) {
        let mut timers = self.timers.borrow_mut();
        if timers.is_empty() {
            return;
        }
        let now = Instant::now();
        while let Some(entry) = timers.first_entry() {
            if entry.key().0 > now {
                break;
            }
            entry.remove().wake();
        }
    }

    fn run_tasks(&self) {
        let mut context = Context::from_waker(&self.waker);
        for _ in 0..ROUNDS {
            let spawned = self.spawned.take();
            // Acquire: synchronizes with the release store in `Woken::wake_by_ref`. The relaxed load comes first because it
            // is cheaper and most turns find no woken task.
            let woken = self.woken.0.load(Ordering::Relaxed) && self.woken.0.swap(false, Ordering::Acquire);
            if spawned.is_empty() && !woken {
                return;
            }
            let mut tasks = self.tasks.borrow_mut();
            tasks.extend(spawned);
            while let Poll::Ready(Some(())) = Pin::new(&mut *tasks).poll_next(&mut context) {}
        }
    }

    /// Runs one turn. Returns whether the loop should end.
    fn turn(self: &Rc<Self>) -> io::Result<bool> {
        if let Some(end) = self.end.get() {
            return Ok(Instant::now() >= end);
        }
        self.turns.set(self.turns.get().wrapping_add(1));
        self.read_events()?;
        self.next_turn.take().into_iter().for_each(Waker::wake);
        while let Ok(submission) = self.submissions.try_recv() {
            submission(self);
            if self.end.get().is_some() {
                return Ok(false);
            }
        }
        if self.turns.get().is_multiple_of(CLOCK_EVERY) {
            self.fire_timers();
        }
        self.run_tasks();
        Ok(false)
    }

    /// Drops all tasks and with them their sockets. The loop ends after the last sends.
    pub(super) fn close(&self) {
        self.spawned.take();
        self.tasks.borrow_mut().clear();
        self.timers.take();
        self.next_turn.take();
        self.end.set(Some(Instant::now() + LAST_SENDS));
    }
}

/// Callback of F-Stack's loop.
unsafe extern "C" fn turn(reactor: *mut std::ffi::c_void) -> c_int {
    // SAFETY: `Reactor::run` passes its own reactor and keeps an `Rc` of it until the loop has ended. The count is raised
    // first because this function drops the `Rc` it makes.
    let reactor = unsafe {
        Rc::increment_strong_count(reactor.cast::<Reactor>());
        Rc::from_raw(reactor.cast::<Reactor>())
    };
    // A panic must not unwind into C.
    let ended = match catch_unwind(AssertUnwindSafe(|| reactor.turn())) {
        Ok(Ok(ended)) => ended,
        Ok(Err(error)) => {
            tracing::error!(%error, "F-Stack's event queue failed: the reactor ends");
            reactor.panicked.set(true);
            true
        }
        Err(_) => {
            reactor.panicked.set(true);
            true
        }
    };
    if ended {
        // SAFETY: called by F-Stack's loop, on its thread.
        unsafe { end_loop() };
    }
    0
}

/// Stops the ports and ends the loop. F-Stack alone would close the ports without stopping them, which DPDK refuses, and
/// would then free memory that DPDK's threads still use.
///
/// # Safety
/// Called by F-Stack's loop, on its thread, so that no burst follows.
unsafe fn end_loop() {
    // SAFETY: by the contract of this function.
    unsafe {
        for port in 0..ff::rte_eth_dev_count_avail() {
            ff::rte_eth_dev_stop(port);
        }
        ff::ff_stop_run();
    }
}

/// Future that completes at an instant of the system's clock.
pub struct Sleep {
    deadline: Instant,
    timer: Option<u64>,
}

impl Sleep {
    pub(super) fn until(deadline: Instant) -> Self {
        Sleep { deadline, timer: None }
    }

    fn cancel(&mut self) {
        if let Some(number) = self.timer.take() {
            Reactor::with(|reactor| {
                reactor.timers.borrow_mut().remove(&(self.deadline, number));
            });
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.deadline {
            self.cancel();
            return Poll::Ready(());
        }
        let deadline = self.deadline;
        let known = self.timer;
        // Other threads have no timers: the future never completes there.
        self.timer = Reactor::with(|reactor| {
            let number = known.unwrap_or_else(|| {
                let number = reactor.next_timer.get();
                reactor.next_timer.set(number + 1);
                number
            });
            let waker = context.waker().clone();
            reactor.timers.borrow_mut().insert((deadline, number), waker);
            number
        });
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Error of a socket operation on another thread.
pub(super) fn off_thread() -> io::Error {
    io::Error::other("an F-Stack socket works on its reactor thread alone")
}

/// Result of an F-Stack call: -1 means an error in `errno`.
pub(super) fn check(result: c_int) -> io::Result<c_int> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}
