//! Whole calls, codec and memory included: a client of this crate, as any program uses it, and `innet-replay serve`.

use std::path::Path;
use std::time::{Duration, Instant};

use base::wait::Wait;
use bytes::Bytes;
use replay_client::{ConnectOptions, connect};
use replay_core::replay::Replay;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};

use super::ends;

/// Bytes of the one tensor of the parameters, and calls in a round: those of `python -m benchmarks.calls`.
const SIZES: [(usize, usize); 6] =
    [(64, 2_000), (1_024, 2_000), (4_096, 2_000), (65_536, 1_000), (1 << 20, 100), (13_170_000, 10)];

const NAME: &str = "policy";

/// One round: the cells that a client measured.
pub fn run(way: &str, folder: &Path) -> Value {
    let mut server = ends::at_server(env!("CARGO_BIN_EXE_innet-replay"));
    server.args(["serve", "--listen", &format!("innet://{}", ends::server(way))]);
    if ends::is_fstack(way) {
        server.args(["--stack", "fstack", "--trusted-network", "--stack-config"]);
        server.arg(ends::server_config(folder, way));
    } else {
        server.arg("--spin");
    }
    let mut client = ends::at_client(std::env::current_exe().unwrap());
    client.args(["call", way]).arg(ends::client_config(folder, way));
    ends::run(server, client)
}

/// The client's process: returns its measurements.
pub fn measure(way: &str, config: &Path) -> Vec<Value> {
    let over_fstack = ends::is_fstack(way);
    let scheme = if over_fstack { "innet+fstack" } else { "innet" };
    let address = format!("{scheme}://{}", ends::server(way));
    let options = ConnectOptions {
        spin: !over_fstack,
        stack_config: over_fstack.then(|| config.to_owned()),
        ..ConnectOptions::default()
    };
    let client = connect(&address.parse().unwrap(), options).unwrap();
    let wait = Wait::forever();
    let get = || client.get_parameters(NAME, 0, None, &wait).unwrap().unwrap();
    let mut cells = Vec::new();
    for (size, count) in SIZES {
        let file = parameters(size);
        let put = || client.put_parameters(NAME, file.clone(), &wait).unwrap();
        let cell = |call: &str, times| ends::cell(json!({"call": call, "bytes": size}), times);
        cells.push(cell("put_parameters", timed(put, count)));
        cells.push(cell("get_parameters", timed(get, count)));
        assert_eq!(get().bytes, file);
    }
    cells
}

/// A safetensors file with one tensor of `size` bytes.
fn parameters(size: usize) -> Bytes {
    let bytes: Vec<u8> = (0..size).map(|number| number as u8).collect();
    let weights = TensorView::new(Dtype::U8, vec![size], &bytes).unwrap();
    let file = safetensors::serialize([("weights", weights)], None);
    file.unwrap().into()
}

fn timed<T>(call: impl Fn() -> T, count: usize) -> Vec<Duration> {
    let once = || {
        let begun = Instant::now();
        call();
        begun.elapsed()
    };
    let warm = ends::warm_up(count);
    (0..warm + count).map(|_| once()).skip(warm).collect()
}
