//! A forked child must neither use nor disturb the connections of its parent. Alone in its process: a fork
//! copies only the thread that calls it.

mod support;

use replay_client::{ConnectOptions, connect};
use replay_core::replay::Replay;
use replay_wire::ErrorCode;
use support::*;

#[test]
fn a_fork_is_told_to_connect_again_and_leaves_the_parent_its_connections() {
    let server = serve(&["innet://127.0.0.1:0"], |_| {});
    let client = connect(&server.addresses()[0], ConnectOptions::default()).unwrap();
    client.create_table(&queue("steps"), &soon()).unwrap();
    let mut pushes = client.open_writer("steps", writer(1), &soon()).unwrap();

    // SAFETY: the child calls nothing that another thread of the parent could hold a lock of (glibc's
    // allocator is usable after a fork), and ends without running the test harness any further.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let refused = [
            client.stats(&soon()).err(),
            pushes.push(steps(0, 1), &soon()).err(),
            client.samples("steps", sample_request(1), 1).err(),
        ];
        let told = refused.into_iter().all(|error| {
            error.is_some_and(|error| error.code() == ErrorCode::Config && error.to_string().contains("after a fork"))
        });
        drop(pushes);
        drop(client);
        // SAFETY: `_exit` ends the child at once.
        unsafe { libc::_exit(if told { 0 } else { 1 }) };
    }
    let mut status = 0;
    // SAFETY: `status` is valid for the call.
    let waited = unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!((waited, status), (child, 0));

    pushes.push(steps(0, 5), &soon()).unwrap();
    pushes.close(&soon()).unwrap();
    assert_eq!(drain(&client, "steps"), [0, 1, 2, 3, 4]);
}
