//! The HTTP side of a server: `/metrics` for Prometheus, `/healthz` for supervisors, `/stats` as JSON, and `/`, a page for browsers
//! that shows the statistics live. It has a thread of its own, and kernel sockets whatever the stack of the replay protocol.

mod metrics;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener as StdTcpListener};
use std::pin::pin;
use std::sync::{Arc, PoisonError};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use hyper::body::Body;
use hyper::header::{
    ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

use super::{ACCEPT_PAUSE, Server, StrangerEvent};
use crate::config::HttpAddress;
use crate::connection::{Phase, reached};
use base::system;
use replay_link::error::{Result, io_error};
use replay_link::stack::kernel::{self, SERVER_USER_TIMEOUT, prepare_tcp};

/// Limit of open connections. A further one closes the oldest, so that idle connections cannot lock a supervisor out. Each may hold one
/// answer: 4 MB for a thousand tables.
pub(super) const MAX_CONNECTIONS: usize = 16;

/// Limit of a connection's life, as a multiple of the handshake deadline, for clients that do not read their answer.
const MAX_LIFE: u32 = 6;

const PAGE: &str = include_str!("http/page.html");

/// The page may load only this server's statistics.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; \
                           connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const TEXT: &str = "text/plain; charset=utf-8";

/// Binds `address`; with `tls`, every address uses TLS, as for the replay protocol. Returns the bound address, too.
///
/// # Errors
/// [`Error::Io`](replay_link::error::Error::Io) names the address and the setting.
pub(super) fn bind(address: &HttpAddress, tls: bool) -> Result<(StdTcpListener, HttpAddress)> {
    let bind = || {
        let listener = kernel::bind_tcp(&address.host, address.port)?;
        let bound = listener.local_addr()?;
        Ok((listener, HttpAddress { host: bound.ip().to_string(), port: bound.port(), tls }))
    };
    bind().map_err(|error: io::Error| {
        let advice = match error.kind() {
            ErrorKind::AddrInUse => ": choose another port, or end the program that has it",
            _ => "",
        };
        io_error(format!("cannot listen on {address} (--http){advice}"))(error)
    })
}

impl Server {
    /// Serves HTTP on this thread until the server has stopped. Begins before the restore and continues during the drain, which a
    /// supervisor can thus observe.
    pub(super) async fn serve_http(self: Arc<Self>, listener: StdTcpListener) {
        let listener = match TcpListener::from_std(listener) {
            Ok(listener) => listener,
            Err(error) => return tracing::error!(%error, "HTTP is not served"),
        };
        let mut open: VecDeque<JoinHandle<()>> = VecDeque::new();
        let mut phase = self.phase.subscribe();
        loop {
            let accepted = tokio::select! {
                biased;
                () = reached(&mut phase, Phase::Stopped) => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    open.retain(|connection| !connection.is_finished());
                    if open.len() >= MAX_CONNECTIONS
                        && let Some(oldest) = open.pop_front()
                    {
                        oldest.abort();
                    }
                    let serve = self.clone().serve_http_client(stream, peer);
                    open.push_back(tokio::task::spawn_local(serve));
                }
                Err(error) => {
                    let (event, now) = (StrangerEvent::NotAccepted, system::now());
                    self.strangers.report(event, "a client of HTTP", &error, now);
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    async fn serve_http_client(self: Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        let served = async {
            prepare_tcp(&SockRef::from(&stream), SERVER_USER_TIMEOUT)?;
            let Some(current) = &self.tls else {
                return self.converse_http(stream, peer).await;
            };
            let acceptor = current.read().unwrap_or_else(PoisonError::into_inner).clone();
            let accepted = tokio::time::timeout(self.handshake_deadline, acceptor.accept(stream)).await;
            self.converse_http(accepted??, peer).await
        };
        let served: std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> = served.await;
        if let Err(error) = served {
            let (event, now) = (StrangerEvent::Http, system::now());
            self.strangers.report(event, &peer.to_string(), &error, now);
        }
    }

    async fn converse_http<T: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: T,
        peer: SocketAddr,
    ) -> std::result::Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let answer = service_fn(|request| {
            let response = self.answer_http(&request, peer);
            async { Ok::<_, Infallible>(response) }
        });
        let mut connection = http1::Builder::new();
        connection.timer(TokioTimer::new()).header_read_timeout(self.handshake_deadline);
        let mut connection = pin!(connection.serve_connection(TokioIo::new(stream), answer));
        let life = self.handshake_deadline * MAX_LIFE;
        if let Ok(ended) = tokio::time::timeout(life, connection.as_mut()).await {
            return Ok(ended?);
        }
        connection.as_mut().graceful_shutdown();
        Ok(tokio::time::timeout(self.handshake_deadline, connection).await??)
    }

    fn answer_http<B: Body>(&self, request: &Request<B>, peer: SocketAddr) -> Response<String> {
        if request.method() != Method::GET && request.method() != Method::HEAD {
            let mut refusal = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET is served here");
            let headers = refusal.headers_mut();
            headers.insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
            return refusal;
        }
        let path = request.uri().path();
        if path == "/healthz" {
            // Needs no token: supervisors have none, and the answer reveals only this state.
            return match *self.phase.borrow() {
                Phase::Starting => plain(StatusCode::SERVICE_UNAVAILABLE, "starting"),
                Phase::Serving => plain(StatusCode::OK, "ok"),
                Phase::Draining | Phase::Stopped => plain(StatusCode::SERVICE_UNAVAILABLE, "shutting down"),
            };
        }
        if let Err(error) = self.authorize_http(request, peer) {
            let mut refusal = plain(StatusCode::UNAUTHORIZED, &error.to_string());
            let realm = HeaderValue::from_static("Basic realm=\"innet-replay\", charset=\"UTF-8\"");
            refusal.headers_mut().insert(WWW_AUTHENTICATE, realm);
            return refusal;
        }
        match path {
            "/" => {
                let mut page = respond(StatusCode::OK, "text/html; charset=utf-8", PAGE.to_owned());
                let policy = HeaderValue::from_static(PAGE_POLICY);
                page.headers_mut().insert(CONTENT_SECURITY_POLICY, policy);
                page
            }
            "/metrics" => match metrics::encode(self.service().stats(), &self.service().extensions) {
                Ok(text) => respond(StatusCode::OK, metrics::CONTENT_TYPE, text),
                Err(error) => plain(StatusCode::INTERNAL_SERVER_ERROR, &error.to_string()),
            },
            "/stats" => {
                let stats = self.service().stats().to_string();
                respond(StatusCode::OK, "application/json", stats)
            }
            _ => plain(StatusCode::NOT_FOUND, "there are /, /metrics, /stats and /healthz"),
        }
    }

    /// Checks the token of a request, on a server with tokens: any role may read statistics.
    ///
    /// # Errors
    /// [`replay_wire::Error::Authentication`], for the client.
    fn authorize_http<B>(&self, request: &Request<B>, peer: SocketAddr) -> Result<()> {
        let header = request.headers().get(AUTHORIZATION);
        let token = header.and_then(sent_token);
        let role = self.context.handshake.role_of(token.as_deref());
        if let (Err(error), Some(_)) = (&role, header) {
            self.context.service.counters.failed_logins.add(1);
            let (event, now) = (StrangerEvent::FailedLogin, system::now());
            self.strangers.report(event, &peer.to_string(), error, now);
        }
        role?;
        Ok(())
    }
}

/// The token of an `Authorization` header: of the scheme Bearer, or the password of the scheme Basic, with any name.
fn sent_token(header: &HeaderValue) -> Option<String> {
    let (scheme, rest) = header.to_str().ok()?.split_once(' ')?;
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.trim().to_owned());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = String::from_utf8(BASE64_STANDARD.decode(rest.trim()).ok()?).ok()?;
    decoded.split_once(':').map(|(_, password)| password.to_owned())
}

fn plain(status: StatusCode, text: &str) -> Response<String> {
    respond(status, TEXT, format!("{text}\n"))
}

fn respond(status: StatusCode, content_type: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn health_is_that_of_each_phase() {
        use replay_core::memory::{Memory, MemoryLimits};
        let server =
            Server::new(&crate::config::ServerConfig::default(), Memory::new(MemoryLimits::default())).unwrap();
        let health = |phase| {
            server.phase.send_replace(phase);
            let request = Request::get("/healthz").body(String::new()).unwrap();
            server.answer_http(&request, ([127, 0, 0, 1], 1).into()).status().as_u16()
        };
        let phases = [Phase::Starting, Phase::Serving, Phase::Draining, Phase::Stopped];
        assert_eq!(phases.map(health), [503, 200, 503, 503]);
    }

    #[test]
    fn a_token_is_sent_as_bearer_or_as_a_password() {
        for (header, token) in [
            ("Bearer secret of the tests", Some("secret of the tests")),
            // printf 'any:secret:of' | base64
            ("basic YW55OnNlY3JldDpvZg==", Some("secret:of")),
            ("Basic YW55", None),
            ("Basic !", None),
            ("Digest a", None),
            ("Bearer", None),
        ] {
            let sent = sent_token(&HeaderValue::from_static(header));
            assert_eq!(sent.as_deref(), token, "{header}");
        }
    }
}
