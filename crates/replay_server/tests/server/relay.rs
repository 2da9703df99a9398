//! A relay between client and server that has a certificate which the client trusts, and forwards the handshake.

use tokio::io::copy_bidirectional;
use tokio::net::TcpListener;

use base::wait::Wait;
use replay_client::connect;
use replay_core::replay::Replay;
use replay_link::stack::Address;
use replay_link::tls::acceptor;
use replay_wire::ErrorCode;

use crate::kernel::{dial_tls, options, start, with_tls};
use crate::suite::refused;
use crate::support::{certificate, until};

#[test]
fn a_relay_that_forwards_the_handshake_owns_no_session() {
    let folder = tempfile::tempdir().unwrap();
    let config = with_tls(folder.path());
    let running = start(&config).unwrap();
    let Address::Tcp { host, port, .. } = running.addresses()[0].clone() else {
        panic!("expected a TCP address");
    };
    let of_relay = tempfile::tempdir().unwrap();
    let (relay_certificate, relay_key) = certificate(of_relay.path());
    let (accepted, _) = acceptor(&relay_certificate, &relay_key).unwrap();
    let trusted = config.tls_cert.clone().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
    let relay = listener.local_addr().unwrap();
    let relaying = std::thread::spawn(move || {
        runtime.block_on(async {
            let (client, _) = listener.accept().await.unwrap();
            let mut client = accepted.accept(client).await.unwrap();
            let mut stream = dial_tls(&host, port, &trusted).await;
            // An error is the end of one of the two.
            let _ = copy_bidirectional(&mut client, &mut stream).await;
        });
    });
    let address: Address = format!("innets://{relay}").parse().unwrap();
    let through = connect(&address, options("secret of the tests", Some(relay_certificate)));
    let (code, message) = refused(through.map(drop));
    assert_eq!(code, ErrorCode::Authentication);
    assert!(message.contains("relay"), "{message}");
    relaying.join().unwrap();
    let service = running.server().service();
    until("the server counts it", || service.stats()["server"]["failed_logins"] == 1);

    let direct = options("secret of the tests", config.tls_cert.clone());
    let client = connect(&running.addresses()[0], direct).unwrap();
    client.stats(&Wait::forever()).unwrap();
}
