//! F-Stack at both ends of a memif: the client in this process, `innet-replay serve` in a child. All of it is one
//! process after another on one socket, as F-Stack starts once in each.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use base::wait::Wait;
use replay_client::{Client, ConnectOptions, connect};
use replay_core::replay::Replay;
use replay_link::error::{Error, Result};
use replay_link::stack::Address;
use replay_wire::ErrorCode;
use replay_wire::auth::Secret;

use crate::client::exercise;
use crate::links::SEGMENTS;
use crate::setup::{Port, Serving};
use crate::support::*;
use crate::traffic::{large_frames_arrive, many_connections_are_served};

const SERVER: &str = "10.8.0.2";
const CLIENT: &str = "10.8.0.1";

struct Ends {
    folder: PathBuf,
    server: PathBuf,
    client: PathBuf,
}

/// The configurations of both ends, the same for every test of this process.
fn ends() -> &'static Ends {
    static ENDS: OnceLock<Ends> = OnceLock::new();
    ENDS.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap().keep();
        let socket = folder.join("memif.sock");
        // Fixed Ethernet addresses: a server that was started again is known by that of the one before.
        let configure = |role: &str, core, address: &str| {
            let mac = format!("02:00:00:00:00:0{}", address.rsplit('.').next().unwrap());
            Port {
                name: &format!("innet-{}-{role}", std::process::id()),
                core,
                address,
                device: &format!("net_memif0,role={role},id=0,mac={mac},socket={}", socket.display()),
                segments: std::env::var_os(SEGMENTS).is_some(),
            }
            .configure(&folder)
        };
        Ends { server: configure("server", 0, SERVER), client: configure("client", 1, CLIENT), folder: folder.clone() }
    })
}

fn serve(more: &[&str]) -> Serving {
    let serving = Serving::on_fstack(&ends().server, SERVER, more);
    if !serving.ready.contains(SERVER) {
        panic!("{:?}", serving.end());
    }
    serving
}

fn options() -> ConnectOptions {
    ConnectOptions { stack_config: Some(ends().client.clone()), ..ConnectOptions::default() }
}

fn dial(scheme: &str, options: ConnectOptions) -> Result<Client> {
    let address: Address = format!("{scheme}://{SERVER}:7710").parse().unwrap();
    connect(&address, options)
}

#[test]
#[ignore = "run by `links`"]
fn every_call_works() {
    let _serving = serve(&[]);
    exercise(&dial("innet+fstack", options()).unwrap());
}

#[test]
#[ignore = "run by `links`"]
fn every_call_works_with_tls_and_a_token() {
    let certificate = rcgen::generate_simple_self_signed(vec![SERVER.to_owned()]).unwrap();
    let file = |name: &str, text: &str| {
        let path = ends().folder.join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let cert = file("cert.pem", &certificate.cert.pem());
    let key = file("key.pem", &certificate.signing_key.serialize_pem());
    let _serving = serve(&["--tls-cert", &cert, "--tls-key", &key, "--token=secret of the tests"]);
    let with = |token: &str| ConnectOptions {
        token: Some(Secret(token.to_owned())),
        tls_ca: Some(cert.clone().into()),
        ..options()
    };
    exercise(&dial("innets+fstack", with("secret of the tests")).unwrap());
    let refused = dial("innets+fstack", with("secret of a stranger")).err().unwrap();
    assert_eq!(refused.code(), ErrorCode::Authentication, "{refused}");
}

#[test]
#[ignore = "run by `links`"]
fn large_frames_pass_both_ways() {
    let _serving = serve(&[]);
    large_frames_arrive(&dial("innet+fstack", options()).unwrap());
}

/// The server's second port is the one: nobody is at the other end of its first.
#[test]
#[ignore = "run by `links`"]
fn each_port_of_a_server_takes_large_frames() {
    let text = std::fs::read_to_string(&ends().server).unwrap();
    let (head, rest) = text.split_once("[port0]").unwrap();
    let first = "[port0]\naddr=10.7.0.2\nnetmask=255.255.255.0\nbroadcast=10.7.0.255\ngateway=10.7.0.254\n";
    let device = format!(
        "eal = --vdev=net_memif1,role=server,id=0,mac=02:00:00:00:07:02,socket={}\n",
        ends().folder.join("nobody.sock").display()
    );
    let head = head.replace("port_list=0", "port_list=0,1");
    let rest = rest.replace("net_memif0", "net_memif2");
    let (other, segments) = rest.split_once("eal = --vdev=").unwrap();
    let text = format!("{head}{first}[port1]{other}{device}eal = --vdev={segments}");
    let path = ends().folder.join("two-ports.ini");
    std::fs::write(&path, text).unwrap();
    let serving = Serving::on_fstack(&path, SERVER, &[]);
    assert!(serving.ready.contains(SERVER), "{:?}", serving.end());
    large_frames_arrive(&dial("innet+fstack", options()).unwrap());
}

#[test]
#[ignore = "run by `links`"]
fn many_connections_share_the_reactors() {
    let _serving = serve(&[]);
    many_connections_are_served(|| dial("innet+fstack", options()));
}

#[test]
#[ignore = "run by `links`"]
fn a_server_that_was_killed_is_found_again_by_its_writers() {
    let serving = serve(&[]);
    let client = dial("innet+fstack", options()).unwrap();
    client.create_table(&queue("steps"), &soon()).unwrap();
    client.put_parameters("policy", parameters(1000), &soon()).unwrap();
    serving.signal(libc::SIGKILL);
    serving.end();
    let _serving = serve(&[]);
    // No reset came from the dead server: the first call notices by that of the new one.
    client.create_table(&queue("steps"), &soon()).unwrap();
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();
    pushes.push(steps(0, 10), &soon()).unwrap();
    pushes.close(&soon()).unwrap();
    assert_eq!(drain(&client, "steps"), (0..10).collect::<Vec<_>>());
}

#[test]
#[ignore = "run by `links`"]
fn calls_end_at_their_deadline_and_by_an_interrupt() {
    let _serving = serve(&[]);
    let client = dial("innet+fstack", options()).unwrap();
    client.create_table(&queue("steps"), &soon()).unwrap();
    let error = client.sample("steps", &sample_request(1), &one_try()).err().unwrap();
    assert_eq!(error.code(), ErrorCode::Deadline, "{error}");
    let interrupted = Wait { interrupted: &|| true, ..Wait::forever() };
    let error = client.sample("steps", &sample_request(1), &interrupted).err().unwrap();
    assert!(matches!(error, Error::Interrupted), "{error}");
    client.stats(&soon()).unwrap();
}

#[test]
#[ignore = "run by `links`"]
fn nobody_at_the_address_is_an_error() {
    let _serving = serve(&[]);
    let patient = || ConnectOptions { connect_timeout: Duration::from_millis(300), ..options() };
    // A port without a server, and an address without a machine.
    for address in [format!("{SERVER}:9"), "10.8.0.77:7710".to_owned()] {
        let address: Address = format!("innet+fstack://{address}").parse().unwrap();
        let error = connect(&address, patient()).err().unwrap();
        assert_eq!(error.code(), ErrorCode::Connect, "{error}");
    }
}

#[test]
#[ignore = "run by `links`"]
fn one_configuration_is_all_that_a_process_has() {
    let _serving = serve(&[]);
    let _client = dial("innet+fstack", options()).unwrap();
    let other = ConnectOptions { stack_config: Some(ends().server.clone()), ..options() };
    let error = dial("innet+fstack", other).err().unwrap();
    assert!(error.to_string().contains("once in a process"), "{error}");
}
