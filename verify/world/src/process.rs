//! Programs of a world. Client code blocks; in a world each of its threads is a coroutine, which is suspended where the thread would wait.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::{Pin, pin};
use std::ptr;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use base::system::simulated::{Entered, Host, enter};
use corosensei::{Coroutine, CoroutineResult, Yielder};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use replay_link::stack::Stack;
use simulation::SimStack;

/// A coroutine is resumed with the waker of its task.
type Suspend = Yielder<Waker, ()>;

thread_local! {
    /// The process that runs now: its program's stack, its waker, and the way to suspend it.
    static RUNNING: RefCell<Option<SimStack>> = const { RefCell::new(None) };
    static WAKER: RefCell<Option<Waker>> = const { RefCell::new(None) };
    static SUSPEND: Cell<*const Suspend> = const { Cell::new(ptr::null()) };
}

/// Stack of the program that runs now.
///
/// # Panics
/// Outside of processes.
pub fn running() -> SimStack {
    RUNNING.with_borrow(Clone::clone).expect("a process runs")
}

/// Whether a process runs now.
pub fn runs() -> bool {
    RUNNING.with_borrow(Option::is_some)
}

/// A thread of a program, as a task of the world.
struct Process {
    stack: SimStack,
    coroutine: Coroutine<Waker, (), ()>,
}

/// A process's turn. It ends also with a panic, after which other worlds run on this thread.
struct Turn(Option<SimStack>);

impl Drop for Turn {
    fn drop(&mut self) {
        RUNNING.set(self.0.take());
        // Left by a process that has ended: `block_on` outside of processes must not find it.
        WAKER.set(None);
    }
}

impl Future for Process {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let _turn = Turn(RUNNING.replace(Some(self.stack.clone())));
        match self.coroutine.resume(context.waker().clone()) {
            CoroutineResult::Yield(()) => Poll::Pending,
            CoroutineResult::Return(()) => Poll::Ready(()),
        }
    }
}

/// Starts a thread of the program of `stack`.
pub fn start(stack: &SimStack, work: impl FnOnce() + 'static) {
    let coroutine = Coroutine::new(move |suspend: &Suspend, waker: Waker| {
        SUSPEND.set(suspend);
        WAKER.set(Some(waker));
        work();
    });
    stack.spawn(Process { stack: stack.clone(), coroutine });
}

/// Suspends the running process until the future is complete; `None` if the process is being killed.
///
/// # Panics
/// Outside of processes.
pub fn block_on<T>(future: impl Future<Output = T>) -> Option<T> {
    // A killed process unwinds: what it drops must not wait, and has no waker.
    if thread::panicking() {
        return None;
    }
    let mut future = pin!(future);
    let suspend = SUSPEND.get();
    let mut waker = WAKER.take().expect("a process runs");
    loop {
        let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
        if let Poll::Ready(done) = polled {
            WAKER.set(Some(waker));
            return Some(done);
        }
        // SAFETY: `SUSPEND` was set by the process that runs now, on whose stack the yielder lives as long as the process: it is set when a
        // process begins, and below when one is resumed, and no other process runs in between.
        waker = unsafe { &*suspend }.suspend(());
        SUSPEND.set(suspend);
    }
}

/// Suspends the running process for a time.
pub fn sleep(time: Duration) {
    // A killed process unwinds outside of its turns.
    if !thread::panicking() {
        block_on(running().sleep(time));
    }
}

/// The host of a world.
struct WorldHost {
    stack: SimStack,
    random: RefCell<StdRng>,
}

impl Host for WorldHost {
    fn now(&self) -> Instant {
        self.stack.now()
    }

    fn sleep(&self, time: Duration) {
        sleep(time);
    }

    fn spawn(&self, _name: &str, work: Box<dyn FnOnce() + Send>) {
        start(&running(), work);
    }

    fn fill_random(&self, bytes: &mut [u8]) {
        self.random.borrow_mut().fill_bytes(bytes);
    }
}

/// Makes the world of `stack` the host of this thread.
pub fn host(stack: &SimStack, seed: u64) -> Entered {
    enter(Rc::new(WorldHost { stack: stack.clone(), random: RefCell::new(StdRng::seed_from_u64(seed)) }))
}
