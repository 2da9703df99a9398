//! Much at a time: large frames and many connections.

use replay_client::{Client, ConnectOptions};
use replay_core::replay::Replay;
use replay_link::error::Result;

use crate::support::*;

/// The parameters of the paper's network.
pub const LARGE: usize = 13_170_000;

const CONNECTIONS: usize = 200;

/// Puts and gets parameters of 13 MB, byte for byte.
pub fn large_frames_arrive(client: &Client) {
    let file = parameters(LARGE);
    for version in 1..=5 {
        let stored = client.put_parameters("large", file.clone(), &soon()).unwrap();
        assert_eq!(stored, version);
        let got = client.get_parameters("large", version - 1, None, &soon()).unwrap();
        assert!(got.unwrap().bytes == file, "version {version} differs");
    }
}

/// As many clients at a time as an experiment has actors, each with a writer.
pub fn many_connections_are_served(connect: impl Fn() -> Result<Client>) {
    let first = connect().unwrap();
    first.create_table(&queue("many"), &soon()).unwrap();
    let clients: Vec<Client> = (0..CONNECTIONS).map(|_| connect().unwrap()).collect();
    std::thread::scope(|scope| {
        for part in clients.chunks(CONNECTIONS / 8) {
            scope.spawn(move || {
                for (number, client) in part.iter().enumerate() {
                    let id = part.as_ptr().addr() as u64 + number as u64;
                    let mut pushes = client.open_writer("many", writer(id), &soon()).unwrap();
                    for step in 0..5 {
                        pushes.push(steps(step, 1), &soon()).unwrap();
                    }
                    pushes.close(&soon()).unwrap();
                }
            });
        }
    });
    let sampled = drain(&first, "many");
    assert_eq!(sampled.len(), 5 * CONNECTIONS);
    for step in 0..5 {
        let count = sampled.iter().filter(|&&number| number == step).count();
        assert_eq!(count, CONNECTIONS, "step {step}");
    }
    first.drop_table("many", &soon()).unwrap();
}

#[test]
#[ignore = "run by `links`"]
fn a_server_takes_and_gives_large_frames() {
    let server = serve(&[&any_port("innet")], |_| {});
    large_frames_arrive(&connect(&server.addresses()[0], ConnectOptions::default()).unwrap());
}

#[test]
#[ignore = "run by `links`"]
fn a_server_has_many_connections() {
    let server = serve(&[&any_port("innet")], |_| {});
    many_connections_are_served(|| connect(&server.addresses()[0], ConnectOptions::default()));
}
