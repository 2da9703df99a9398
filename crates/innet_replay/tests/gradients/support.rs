//! A server process, its workers, and vectors to sum.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use base::wait::Wait;
use gradients::{Arithmetic, JoinJob, Sum};
use gradients_net::GradientWorker;
use gradients_net::error::Result;
use replay_client::{Client, ConnectOptions, connect};
use replay_core::replay::Replay;
use replay_link::error::Result as NetResult;
use replay_link::stack::Address;
use serde_json::Value;

/// Deadline that only a hanging test reaches.
pub const LONG: Duration = Duration::from_secs(60);

/// `innet-replay serve`, until it is dropped.
pub struct Serving {
    child: Child,
    pub address: Address,
    pub gradients: Option<SocketAddr>,
}

impl Serving {
    /// A server with these arguments alone.
    pub fn with(arguments: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_innet-replay"))
            .args(["serve", "--log-level=error"])
            .args(arguments)
            .env_remove("INNET_TOKEN")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        let output = child.stdout.take().unwrap();
        BufReader::new(output).read_line(&mut ready).unwrap();
        let words: Vec<&str> = ready.split_whitespace().collect();
        let after = |word| {
            let at = words.iter().position(|found| *found == word)?;
            words.get(at + 1).copied()
        };
        Serving {
            child,
            address: after("on").expect("the server is ready").parse().unwrap(),
            gradients: after("gradients").map(|address| address.parse().unwrap()),
        }
    }

    /// A server at free ports of loopback, with these arguments.
    pub fn start(arguments: &[&str]) -> Self {
        let here = ["--listen=127.0.0.1:0", "--gradients=127.0.0.1:0"];
        Self::with(&[&here, arguments].concat())
    }

    pub fn signal(&self, signal: libc::c_int) {
        // SAFETY: a child of this process that has not been waited for.
        unsafe { libc::kill(self.child.id() as libc::pid_t, signal) };
    }

    pub fn client(&self) -> Client {
        self.connect().unwrap()
    }

    pub fn connect(&self) -> NetResult<Client> {
        connect(&self.address, ConnectOptions::default())
    }

    pub fn join(&self, request: &JoinJob) -> Result<GradientWorker> {
        join(&self.client(), request, &Wait::forever())
    }

    /// Joins all workers of a job.
    pub fn join_all(&self, requests: impl IntoIterator<Item = JoinJob>) -> Vec<GradientWorker> {
        let join = |request| self.join(&request).unwrap();
        requests.into_iter().map(join).collect()
    }

    /// The statistics of gradients.
    pub fn stats(&self) -> Value {
        self.client().stats(&Wait::forever()).unwrap()["gradients"].take()
    }

    /// Requests statistics until they are as wanted.
    pub fn until(&self, wanted: impl Fn(&Value) -> bool) {
        let begun = Instant::now();
        loop {
            let stats = self.stats();
            if wanted(&stats) {
                return;
            }
            assert!(begun.elapsed() < LONG, "{stats:#}");
        }
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Joins on UDP.
pub fn join(client: &Client, request: &JoinJob, wait: &Wait<'_>) -> Result<GradientWorker> {
    GradientWorker::join(client, request, None, None, wait)
}

/// Request of one of `workers` workers, with settings that tests change.
pub fn request(worker: u16, workers: u16) -> JoinJob {
    JoinJob {
        job: "job".into(),
        worker,
        workers,
        world: workers.into(),
        name: format!("host-{worker}"),
        arithmetic: Arithmetic::Float,
        segment_values: 360,
        deadline: LONG,
        asynchronous: None,
        below: None,
    }
}

pub fn requests(workers: u16) -> impl Iterator<Item = JoinJob> {
    (0..workers).map(move |worker| request(worker, workers))
}

/// Vectors of whole numbers, whose sums are exact in float32, in every order.
pub fn whole_numbers(workers: usize, length: usize, seed: usize) -> Vec<Vec<f32>> {
    let value = |worker, place| ((worker + 1) * (place % 997) + seed) as f32;
    let vector = |worker| (0..length).map(|place| value(worker, place)).collect();
    (0..workers).map(vector).collect()
}

pub fn exact(vectors: &[Vec<f32>]) -> Vec<f32> {
    let length = vectors.first().map_or(0, Vec::len);
    let sum = |place| vectors.iter().map(|vector| vector[place]).sum();
    (0..length).map(sum).collect()
}

/// Sums each vector with its worker, all at the same time.
pub fn sum_all(workers: &mut [GradientWorker], vectors: &mut [Vec<f32>]) -> Vec<Result<Sum>> {
    thread::scope(|scope| {
        let threads: Vec<_> = workers
            .iter_mut()
            .zip(vectors)
            .map(|(worker, values)| scope.spawn(|| worker.sum(values, false, &Wait::forever())))
            .collect();
        threads.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

/// Sums rounds of whole numbers, and checks the sums.
pub fn sum_rounds(workers: &mut [GradientWorker], rounds: usize, length: usize) {
    for round in 0..rounds {
        let mut vectors = whole_numbers(workers.len(), length, round);
        let expected = exact(&vectors);
        for sum in sum_all(workers, &mut vectors) {
            assert_eq!(sum.unwrap().workers as usize, workers.len());
        }
        assert!(vectors.iter().all(|vector| vector == &expected));
    }
}
