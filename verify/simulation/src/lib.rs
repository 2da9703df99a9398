//! A simulated network for tests: one thread, a virtual clock, and all choices (the next task, the delay of a segment, the
//! bytes of one read) from a seed, so that a failure can be repeated.
//!
//! [`Sim`] owns and runs the world; [`SimStack`] is the [`Stack`] inside it. The clock stops while a task can run and jumps to
//! the next timer when none can. Streams keep TCP's guarantees, so loss shows as delay, a partition as silence, and a cut as
//! a reset that loses the bytes in transit.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use base::system::OsError;
use replay_link::error::Result;
use replay_link::stack::{Address, Stack};

mod link;
mod machine;

use link::WeakLink;
pub use link::{SimLink, SimStream};
use machine::Queues;
pub use machine::ServiceTimes;

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// The world: its tasks, its clock and its network. Dropping it drops every task.
pub struct Sim {
    stack: SimStack,
}

/// Handle to the world for the tasks of one program.
#[derive(Clone)]
pub struct SimStack {
    world: Rc<RefCell<World>>,
    program: u64,
}

struct World {
    now: Instant,
    random: StdRng,
    /// Tasks with their programs.
    tasks: BTreeMap<u64, (u64, Task)>,
    /// Tasks of paused programs that were woken, by program.
    paused: BTreeMap<u64, BTreeSet<u64>>,
    /// The next number of a task, a program or a timer.
    next_number: u64,
    /// Of everything that happened.
    events: DefaultHasher,
    /// Connections, with the programs that opened them.
    links: Vec<(u64, WeakLink)>,
    ready: Arc<Ready>,
    /// Wakers by time; the number distinguishes timers of one instant.
    timers: BTreeMap<(Instant, u64), Waker>,
    listeners: HashMap<Address, Rc<RefCell<Backlog>>>,
    /// Machines that take time, by program.
    machines: HashMap<u64, Rc<RefCell<Queues>>>,
    next_port: u16,
    next_connection: u64,
    settings: Settings,
}

/// What a test sets.
struct Settings {
    /// Delays of segments.
    delay: RangeInclusive<Duration>,
    /// Those of connections to some programs.
    delays_to: BTreeMap<u64, RangeInclusive<Duration>>,
    /// Bytes that a connection buffers in each direction.
    buffer: usize,
    /// Writes to a full connection may return 0.
    returns_zero: bool,
    /// Time of work off the I/O threads.
    blocking: Duration,
}

impl World {
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }
}

struct Backlog {
    /// Program that listens.
    program: u64,
    connections: VecDeque<(SimStream, String)>,
    waker: Option<Waker>,
}

/// Woken tasks. Wakers have to be `Send`, so this part of the world has a lock.
#[derive(Default)]
struct Ready(Mutex<Vec<u64>>);

impl Ready {
    fn push(&self, task: u64) {
        let mut ready = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !ready.contains(&task) {
            ready.push(task);
        }
    }
}

struct TaskWaker {
    task: u64,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.ready.push(self.task);
    }
}

impl Sim {
    /// A world with the choices of `seed`. Segments take 0 to 2 ms; a connection buffers 64 KiB in each direction.
    pub fn new(seed: u64) -> Self {
        Sim {
            stack: SimStack {
                world: Rc::new(RefCell::new(World {
                    now: Instant::now(),
                    random: StdRng::seed_from_u64(seed),
                    tasks: BTreeMap::new(),
                    paused: BTreeMap::new(),
                    next_number: 0,
                    events: DefaultHasher::new(),
                    links: Vec::new(),
                    ready: Arc::default(),
                    timers: BTreeMap::new(),
                    listeners: HashMap::new(),
                    machines: HashMap::new(),
                    next_port: 40_000,
                    next_connection: 1,
                    settings: Settings {
                        delay: Duration::ZERO..=Duration::from_millis(2),
                        delays_to: BTreeMap::new(),
                        buffer: 1 << 16,
                        returns_zero: false,
                        blocking: Duration::from_millis(500),
                    },
                })),
                program: 0,
            },
        }
    }

    /// The stack of this world.
    pub fn stack(&self) -> SimStack {
        self.stack.clone()
    }

    /// Runs all tasks until `future` completes.
    ///
    /// # Panics
    /// At a deadlock: every task waits and no timer is set.
    pub fn run<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> T {
        let value = Rc::new(RefCell::new(None));
        self.stack.spawn({
            let value = value.clone();
            async move { *value.borrow_mut() = Some(future.await) }
        });
        loop {
            while let Some(task) = self.stack.next_ready() {
                self.stack.poll(task);
                if let Some(value) = value.borrow_mut().take() {
                    return value;
                }
            }
            assert!(self.stack.jump_to_next_timer(), "every task of the simulation waits and no timer is set");
        }
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        // Breaks the cycle of references between the world and its tasks.
        let tasks = std::mem::take(&mut self.stack.world.borrow_mut().tasks);
        drop(tasks);
    }
}

impl SimStack {
    /// Sets the range of delays for segments sent from now on, on all connections.
    pub fn set_delay(&self, delay: RangeInclusive<Duration>) {
        let settings = &mut self.world.borrow_mut().settings;
        settings.delay = delay;
        settings.delays_to.clear();
    }

    /// Sets the range of delays on connections that this program accepts from now on, until [`Self::set_delay`].
    pub fn set_own_delay(&self, delay: RangeInclusive<Duration>) {
        self.world.borrow_mut().settings.delays_to.insert(self.program, delay);
    }

    /// Sets the buffer of connections opened from now on: sent but unread bytes in each direction.
    pub fn set_buffer(&self, bytes: usize) {
        self.world.borrow_mut().settings.buffer = bytes;
    }

    /// Whether a write to a full connection may return 0, as a stack without room for the first byte does, or always waits.
    pub fn set_returns_zero(&self, returns_zero: bool) {
        self.world.borrow_mut().settings.returns_zero = returns_zero;
    }

    /// Sets the time of [`Stack::run_blocking`], half a second by default.
    pub fn set_blocking(&self, time: Duration) {
        self.world.borrow_mut().settings.blocking = time;
    }

    /// Gives this program a machine of its own: messages of connections that it accepts from now on wait for its port and processors, and
    /// are no longer divided.
    pub fn set_service_times(&self, times: ServiceTimes) {
        let mut world = self.world.borrow_mut();
        let queues = Queues::new(times, world.now);
        world.machines.insert(self.program, Rc::new(RefCell::new(queues)));
    }

    /// Time that the processors of this program's machine have worked.
    pub fn busy(&self) -> Duration {
        let world = self.world.borrow();
        let machine = world.machines.get(&self.program);
        machine.map_or(Duration::ZERO, |machine| machine.borrow().busy())
    }

    /// Connects to a listener of this world.
    ///
    /// # Errors
    /// Refused when there is no listener.
    pub fn connect(&self, address: &Address) -> io::Result<SimStream> {
        let (backlog, name, buffer, machine) = {
            let mut world = self.world.borrow_mut();
            let Some(backlog) = world.listeners.get(address).cloned() else {
                return Err(io::ErrorKind::ConnectionRefused.into());
            };
            let name = format!("sim {}", world.next_connection);
            world.next_connection += 1;
            let machine = world.machines.get(&backlog.borrow().program).cloned();
            (backlog, name, world.settings.buffer, machine)
        };
        let mut backlog = backlog.borrow_mut();
        let (ours, theirs) = SimStream::pair(self, backlog.program, buffer, machine);
        self.world.borrow_mut().links.push((self.program, ours.link().downgrade()));
        backlog.connections.push_back((theirs, name));
        if let Some(waker) = backlog.waker.take() {
            waker.wake();
        }
        Ok(ours)
    }

    /// The stack of another program.
    pub fn program(&self) -> SimStack {
        let mut world = self.world.borrow_mut();
        let program = world.number();
        SimStack { world: self.world.clone(), program }
    }

    /// Ends the program of `of` at once: drops its tasks wherever they wait, which closes its connections and listeners.
    pub fn kill(&self, of: &SimStack) {
        let mut world = self.world.borrow_mut();
        let tasks = std::mem::take(&mut world.tasks);
        let (killed, others): (BTreeMap<_, _>, _) =
            tasks.into_iter().partition(|(_, (program, _))| *program == of.program);
        world.tasks = others;
        world.paused.remove(&of.program);
        // Tasks use the world as they are dropped.
        drop(world);
        drop(killed);
    }

    /// Stops the program of `of`, as SIGSTOP does, until [`Self::resume`]. Its connections stay open.
    pub fn pause(&self, of: &SimStack) {
        let mut world = self.world.borrow_mut();
        world.paused.entry(of.program).or_default();
    }

    /// Ends a pause of the program of `of`.
    pub fn resume(&self, of: &SimStack) {
        let mut world = self.world.borrow_mut();
        for task in world.paused.remove(&of.program).unwrap_or_default() {
            world.ready.push(task);
        }
    }

    /// Moves the clock ahead at once, as a suspended machine finds it: timers until then are late.
    pub fn jump(&self, time: Duration) {
        self.world.borrow_mut().now += time;
    }

    /// Faults of all open connections, from the ends that opened them.
    pub fn links(&self) -> Vec<SimLink> {
        let mut world = self.world.borrow_mut();
        world.links.retain(|(_, link)| link.upgrade(self).is_some());
        world.links.iter().filter_map(|(_, link)| link.upgrade(self)).collect()
    }

    /// [`Self::links`] of connections that this program has opened.
    pub fn own_links(&self) -> Vec<SimLink> {
        let world = self.world.borrow();
        let own = world.links.iter().filter(|(program, _)| *program == self.program);
        own.filter_map(|(_, link)| link.upgrade(self)).collect()
    }

    /// Adds an event to [`Self::events`].
    pub fn note(&self, event: impl Hash) {
        event.hash(&mut self.world.borrow_mut().events);
    }

    /// Hash of all events so far: tasks that ran, how many bytes were sent, and what was noted. A seed always has the same.
    pub fn events(&self) -> u64 {
        self.world.borrow().events.finish()
    }

    /// A random number from the world's seed.
    pub fn random(&self) -> u64 {
        self.world.borrow_mut().random.random()
    }

    /// Completes after `duration` by this world's clock.
    pub fn sleep(&self, duration: Duration) -> impl Future<Output = ()> + 'static {
        self.sleep_until(self.now() + duration)
    }

    fn next_ready(&self) -> Option<u64> {
        let mut world = self.world.borrow_mut();
        let ready = world.ready.clone();
        let mut ready = ready.0.lock().unwrap_or_else(PoisonError::into_inner);
        if ready.is_empty() {
            return None;
        }
        // Sorted, because tokio wakes the receivers of a `watch` in a random order.
        ready.sort_unstable();
        let chosen = world.random.random_range(0..ready.len());
        Some(ready.swap_remove(chosen))
    }

    fn poll(&self, id: u64) {
        let (task, ready) = {
            let mut world = self.world.borrow_mut();
            let program = world.tasks.get(&id).map(|(program, _)| *program);
            if let Some(woken) = program.and_then(|program| world.paused.get_mut(&program)) {
                woken.insert(id);
                return;
            }
            (world.tasks.remove(&id), world.ready.clone())
        };
        // A finished task may be woken, too.
        let Some((program, mut task)) = task else {
            return;
        };
        self.note(id);
        let waker = Waker::from(Arc::new(TaskWaker { task: id, ready }));
        if task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            self.world.borrow_mut().tasks.insert(id, (program, task));
        }
    }

    fn jump_to_next_timer(&self) -> bool {
        let mut world = self.world.borrow_mut();
        let Some(&(next, _)) = world.timers.keys().next() else {
            return false;
        };
        world.now = world.now.max(next);
        while let Some(entry) = world.timers.first_entry() {
            if entry.key().0 > next {
                break;
            }
            entry.remove().wake();
        }
        true
    }

    /// Wakes `waker` at `at`; the number cancels it.
    fn set_timer(&self, at: Instant, waker: Waker) -> u64 {
        let mut world = self.world.borrow_mut();
        let number = world.number();
        world.timers.insert((at, number), waker);
        number
    }

    /// Delay of a segment on a connection to the program `server`.
    fn sample_delay(&self, server: u64) -> Duration {
        let mut world = self.world.borrow_mut();
        let Settings { delay, delays_to, .. } = &world.settings;
        let delay = delays_to.get(&server).unwrap_or(delay).clone();
        world.random.random_range(delay)
    }

    /// Whether a write to a full connection returns 0 this time.
    fn samples_zero(&self) -> bool {
        let mut world = self.world.borrow_mut();
        world.settings.returns_zero && world.random.random_bool(0.1)
    }

    /// Number of bytes that one call moves, at least 1.
    fn sample_part(&self, bytes: usize) -> usize {
        self.world.borrow_mut().random.random_range(1..=bytes)
    }
}

impl Stack for SimStack {
    type Stream = SimStream;
    type Listener = SimListener;
    type Incoming = SimStream;

    fn listen(&self, address: &Address) -> Result<SimListener> {
        let mut world = self.world.borrow_mut();
        let mut bound = address.clone();
        if let Address::Tcp { port, .. } = &mut bound
            && *port == 0
        {
            *port = world.next_port;
            world.next_port += 1;
        }
        if world.listeners.contains_key(&bound) {
            let what = format!("cannot listen on {bound}");
            return Err(OsError::of(what)(io::ErrorKind::AddrInUse.into()).into());
        }
        let backlog =
            Rc::new(RefCell::new(Backlog { program: self.program, connections: VecDeque::new(), waker: None }));
        world.listeners.insert(bound.clone(), backlog.clone());
        drop(world);
        Ok(SimListener { stack: self.clone(), address: bound, backlog })
    }

    fn address(&self, listener: &SimListener) -> Address {
        listener.address.clone()
    }

    async fn accept(&self, listener: &mut SimListener) -> io::Result<(SimStream, String)> {
        std::future::poll_fn(|cx| {
            let mut backlog = listener.backlog.borrow_mut();
            match backlog.connections.pop_front() {
                Some(accepted) => Poll::Ready(Ok(accepted)),
                None => {
                    backlog.waker = Some(cx.waker().clone());
                    Poll::Pending
                }
            }
        })
        .await
    }

    fn open(&self, incoming: SimStream) -> io::Result<SimStream> {
        Ok(incoming)
    }

    fn now(&self) -> Instant {
        self.world.borrow().now
    }

    fn sleep_until(&self, deadline: Instant) -> impl Future<Output = ()> + 'static {
        Sleep { stack: self.clone(), deadline, timer: None }
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        let mut world = self.world.borrow_mut();
        let id = world.number();
        world.tasks.insert(id, (self.program, Box::pin(task)));
        world.ready.push(id);
    }

    /// Takes the time of [`Self::set_blocking`] by this world's clock.
    async fn run_blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
        let time = self.world.borrow().settings.blocking;
        self.sleep(time).await;
        Ok(work())
    }
}

/// A bound address of a simulated network.
pub struct SimListener {
    stack: SimStack,
    address: Address,
    backlog: Rc<RefCell<Backlog>>,
}

impl Drop for SimListener {
    fn drop(&mut self) {
        self.stack.world.borrow_mut().listeners.remove(&self.address);
    }
}

struct Sleep {
    stack: SimStack,
    deadline: Instant,
    timer: Option<u64>,
}

impl Sleep {
    fn cancel(&mut self) {
        if let Some(number) = self.timer.take() {
            let key = (self.deadline, number);
            self.stack.world.borrow_mut().timers.remove(&key);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.cancel();
        if self.stack.now() >= self.deadline {
            return Poll::Ready(());
        }
        self.timer = Some(self.stack.set_timer(self.deadline, cx.waker().clone()));
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.cancel();
    }
}

#[cfg(test)]
mod tests;
