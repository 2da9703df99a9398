//! A worker's session at an aggregator, and the controls it can send.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::packet::{Ack, Cookie, Header, Key, Kind, Status};
use super::window::Window;
use super::{Arithmetic, JoinJob, Ticket, Transmit};

/// How long a control waits for its answer before it is sent again.
const CONTROL_PATIENCE: Duration = Duration::from_millis(20);
const MOST_CONTROL_PATIENCE: Duration = Duration::from_millis(500);

/// Why a sum or a control came to nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// Workers are missing.
    #[error(
        "{reason}; reset the job when all workers are there, or begin another one, with fewer or where workers do not wait for each other"
    )]
    Missing {
        /// Their numbers; empty where they are not known.
        workers: Vec<u16>,
        /// Who is missing, and for how long.
        reason: String,
    },
    /// The aggregator does not answer.
    #[error(
        "the aggregator at {address} did not answer within {waited_ms} ms; is it running, and do its datagrams arrive here?"
    )]
    Silent {
        /// Where it should be.
        address: SocketAddr,
        /// How long was waited.
        waited_ms: u128,
    },
    /// The job is suspended.
    #[error("{0}; nothing is added up until a reset")]
    Halted(String),
    /// The job was reset in the middle of a round.
    #[error("{0}: the sum under way is lost; sum again, all workers together")]
    Reset(String),
    /// Others have gone on without this worker.
    #[error(
        "this worker is too far behind: the sum of round {round} is no longer kept; pull the weights again"
    )]
    Behind {
        /// The round.
        round: u64,
    },
    /// The aggregator refused a control.
    #[error("the aggregator refused: {0}")]
    Refused(String),
    /// The system refused to send or to receive.
    #[error("datagrams of gradients: {0}")]
    Io(String),
    /// A signal arrived while waiting.
    #[error("interrupted")]
    Interrupted,
    /// An earlier sum failed.
    #[error("an earlier sum of this worker failed: reset the job, or join again")]
    Broken,
}

impl Failure {
    /// The failure that a client's error carries, if it is one of gradients.
    pub fn of(error: &replay_core::Error) -> Option<&Failure> {
        match error {
            replay_core::Error::Gradients(failure) => failure.downcast_ref(),
            _ => None,
        }
    }
}

impl From<Failure> for replay_core::Error {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Interrupted => replay_core::Error::Interrupted,
            failure => replay_core::Error::Gradients(Box::new(failure)),
        }
    }
}

/// Something a worker does with an aggregator, step by step.
pub trait Exchange {
    /// What it comes to.
    type Output;
    /// Takes a datagram that came from `from`.
    fn receive<T: Transmit>(
        &mut self,
        now: Instant,
        from: SocketAddr,
        datagram: &[u8],
        out: &mut T,
    );
    /// Sends what is due, and says what it came to, once it has come to something.
    fn poll<T: Transmit>(
        &mut self,
        now: Instant,
        out: &mut T,
    ) -> Option<Result<Self::Output, Failure>>;
    /// When to poll again, if nothing arrives before.
    fn next_wake(&self) -> Instant;
}

impl<E: Exchange> Exchange for &mut E {
    type Output = E::Output;

    fn receive<T: Transmit>(
        &mut self,
        now: Instant,
        from: SocketAddr,
        datagram: &[u8],
        out: &mut T,
    ) {
        (**self).receive(now, from, datagram, out);
    }

    fn poll<T: Transmit>(
        &mut self,
        now: Instant,
        out: &mut T,
    ) -> Option<Result<Self::Output, Failure>> {
        (**self).poll(now, out)
    }

    fn next_wake(&self) -> Instant {
        (**self).next_wake()
    }
}

/// A worker that has joined.
pub struct Worker {
    pub(super) aggregator: SocketAddr,
    pub(super) session: u32,
    pub(super) world: u32,
    pub(super) arithmetic: Arithmetic,
    pub(super) segment_values: usize,
    pub(super) next_round: u64,
    pub(super) window: Window,
    /// A sum failed, and the job has not been reset since.
    pub(super) broken: bool,
    key: Key,
    path: Path,
    /// For contributions on their way out.
    pub(super) scratch: Vec<u8>,
}

/// Whether the aggregator knows where this worker is.
#[derive(Default)]
struct Path {
    proved: bool,
    cookie: Cookie,
    tries: u32,
    ask: Option<Instant>,
}

impl Worker {
    /// The worker that joined with `request` and was given `ticket` by the aggregator at `aggregator`.
    pub fn new(aggregator: SocketAddr, request: &JoinJob, ticket: &Ticket) -> Self {
        Worker {
            aggregator,
            session: ticket.session,
            world: request.world,
            arithmetic: request.arithmetic,
            segment_values: request.segment_values.into(),
            next_round: ticket.round,
            window: Window::new(ticket.window),
            broken: false,
            key: ticket.key,
            path: Path::default(),
            scratch: Vec::new(),
        }
    }

    /// The number of the round that comes next.
    pub fn next_round(&self) -> u64 {
        self.next_round
    }

    pub(super) fn send<T: Transmit>(
        &self,
        kind: Kind,
        round: u64,
        segment: u32,
        body: &[u8],
        out: &mut T,
    ) {
        let header = Header::new(kind, self.session, round, segment);
        out.send(self.aggregator, &header.encode(), body);
    }

    /// Header and body of a datagram that is the aggregator's to this worker.
    pub(super) fn read<'a>(
        &self,
        from: SocketAddr,
        datagram: &'a [u8],
    ) -> Option<(Header, &'a [u8])> {
        let (header, body) = Header::decode(datagram)?;
        (from == self.aggregator && header.session == self.session).then_some((header, body))
    }

    /// Shows the aggregator where this worker is; `true` when it knows.
    pub(super) fn prove<T: Transmit>(&mut self, now: Instant, out: &mut T) -> bool {
        if !self.path.proved && self.path.ask.is_none_or(|ask| ask <= now) {
            self.path.ask = Some(now + patience(self.path.tries));
            self.path.tries += 1;
            let body = [self.key.as_slice(), &self.path.cookie].concat();
            self.send(Kind::Join, self.next_round, 0, &body, out);
        }
        self.path.proved
    }

    /// Takes what belongs to [`Worker::prove`]; `false` for anything else.
    pub(super) fn proving(&mut self, header: Header, body: &[u8]) -> bool {
        if header.kind == Kind::Join {
            if let Ok(cookie) = body.try_into()
                && !self.path.proved
            {
                self.path.cookie = cookie;
                // At once, with the cookie.
                self.path.ask = None;
            }
            return true;
        }
        // Sums come here, too, and many: they are told by their kind alone.
        if header.kind != Kind::Ack {
            return false;
        }
        let ack = Ack::decode(body);
        let proved = ack.is_some_and(|a| (a.status, a.about) == (Status::Done, Kind::Join));
        self.path.proved |= proved;
        proved
    }

    pub(super) fn wake_to_prove(&self) -> Option<Instant> {
        self.path.ask.filter(|_| !self.path.proved)
    }

    /// Sends a control until it is answered, or until `deadline`.
    pub fn call(&mut self, command: Command, now: Instant, deadline: Instant) -> Call<'_> {
        Call {
            body: self.key.to_vec(),
            worker: self,
            command,
            tries: 0,
            begun: now,
            ask: now,
            deadline,
            answer: None,
        }
        .with_argument()
    }
}

/// How long a control waits for its answer at the try of this number, from 0.
pub(super) fn patience(tries: u32) -> Duration {
    (CONTROL_PATIENCE * (1 << tries.min(8))).min(MOST_CONTROL_PATIENCE)
}

/// What a worker can ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Show where it is, before the first sum.
    Join,
    /// Go.
    Leave,
    /// Drop what is under way, or go on after a failure.
    Reset,
    /// Set the number of contributions that make a sum.
    SetThreshold(u16),
    /// Send what there is of the round that comes next for this worker.
    Force,
    /// Suspend the job, for this reason.
    Halt(String),
}

/// A control under way.
pub struct Call<'a> {
    worker: &'a mut Worker,
    command: Command,
    body: Vec<u8>,
    tries: u32,
    begun: Instant,
    ask: Instant,
    deadline: Instant,
    answer: Option<Result<(), Failure>>,
}

impl Call<'_> {
    fn with_argument(mut self) -> Self {
        match &self.command {
            Command::SetThreshold(threshold) => self.body.extend(threshold.to_le_bytes()),
            Command::Halt(reason) => {
                let reason = Ack {
                    text: reason.clone(),
                    ..Ack::new(Status::Halted, Kind::Halt)
                };
                self.body.extend(reason.encode());
            }
            _ => {}
        }
        self
    }

    fn kind(&self) -> Kind {
        match self.command {
            Command::Join => Kind::Join,
            Command::Leave => Kind::Leave,
            Command::Reset => Kind::Reset,
            Command::SetThreshold(_) => Kind::SetH,
            Command::Force => Kind::FBcast,
            Command::Halt(_) => Kind::Halt,
        }
    }
}

impl Exchange for Call<'_> {
    type Output = ();

    fn receive<T: Transmit>(
        &mut self,
        _now: Instant,
        from: SocketAddr,
        datagram: &[u8],
        _out: &mut T,
    ) {
        let Some((header, body)) = self.worker.read(from, datagram) else {
            return;
        };
        if self.worker.proving(header, body) {
            if self.worker.path.proved && self.command == Command::Join {
                self.answer = Some(Ok(()));
            }
            return;
        }
        if header.kind != Kind::Ack {
            return;
        }
        let Some(ack) = Ack::decode(body) else {
            return;
        };
        let next = header.round_near(self.worker.next_round);
        if self.command == Command::Reset
            && matches!(ack.status, Status::Done | Status::Reset)
            && ack.about == Kind::Reset
            && next.is_some_and(|next| next > self.worker.next_round - 1)
        {
            self.worker.next_round = next.unwrap_or(self.worker.next_round);
            self.worker.broken = false;
            self.answer = Some(Ok(()));
        } else if ack.about == self.kind() {
            match ack.status {
                Status::Done if self.command != Command::Reset => self.answer = Some(Ok(())),
                Status::Refused => self.answer = Some(Err(Failure::Refused(ack.text))),
                _ => {}
            }
        }
    }

    fn poll<T: Transmit>(&mut self, now: Instant, out: &mut T) -> Option<Result<(), Failure>> {
        if self.answer.is_some() {
            return self.answer.take();
        }
        if now >= self.deadline {
            return Some(Err(Failure::Silent {
                address: self.worker.aggregator,
                waited_ms: now.duration_since(self.begun).as_millis(),
            }));
        }
        if self.worker.prove(now, out) && self.command != Command::Join && self.ask <= now {
            self.ask = now + patience(self.tries);
            self.tries += 1;
            // A reset is of the round before the next one: the one that was given up.
            let round = match self.command {
                Command::Reset => self.worker.next_round - 1,
                _ => self.worker.next_round,
            };
            let segment = match self.command {
                Command::Force => super::packet::ALL_SEGMENTS,
                _ => 0,
            };
            self.worker
                .send(self.kind(), round, segment, &self.body, out);
        }
        None
    }

    fn next_wake(&self) -> Instant {
        let wake = self.worker.wake_to_prove().unwrap_or(self.ask);
        wake.min(self.deadline)
    }
}
