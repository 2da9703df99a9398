//! Steps as Breakout's: a table for them, generated frames that pack like the game's, and a writer's step.
#![allow(dead_code)]

use std::fmt::Debug;

use base::wait::Wait;
use replay_core::schema::{Codec, Column, Dtype};
use replay_core::view::{NStep, Padding, ViewSpec};
use replay_core::writer::{StepBatch, Values, Writer};
use replay_core::{Error, TableConfig};

const SIDE: usize = 84;
const ACTIONS: usize = 4;
/// Most streams of one writer here.
pub const STREAMS: usize = 16;

/// The table of a Breakout run.
pub fn table(capacity: u64) -> TableConfig {
    table_of(Codec::Lz4, capacity)
}

/// The same table, with frames packed by `codec`.
pub fn table_of(codec: Codec, capacity: u64) -> TableConfig {
    let column = |name: &str, dtype, shape: &[u32], codec| Column {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        codec,
        finite: true,
        max_length: 0,
    };
    TableConfig::new(
        "breakout",
        vec![
            column("frame", Dtype::Uint8, &[SIDE as u32; 2], codec),
            column("action", Dtype::Uint8, &[], Codec::None),
            column("reward", Dtype::Float32, &[], Codec::None),
        ],
        capacity,
    )
}

/// Four frames and three steps, as Ape-X learns from them.
pub fn view() -> ViewSpec {
    ViewSpec::NStep(NStep { observation: "frame".into(), stack: 4.into(), n: 3, gamma: 0.99, padding: Padding::Zero })
}

/// Walls, a score, rows of bricks with holes, a paddle and a ball.
fn frame(step: usize) -> Vec<u8> {
    let mut pixels = vec![0; SIDE * SIDE];
    let mut fill = |top: usize, left: usize, height: usize, width: usize, value: u8| {
        for row in top..(top + height).min(SIDE) {
            pixels[row * SIDE..][left..(left + width).min(SIDE)].fill(value);
        }
    };
    fill(6, 0, 8, SIDE, 142);
    fill(6, 0, 72, 4, 142);
    fill(6, 80, 72, 4, 142);
    for digit in 0..3 {
        fill(1, 20 + 8 * digit, 4, 3 + (step / 40 + digit) % 3, 142);
    }
    for row in 0..6 {
        fill(23 + 3 * row, 4, 3, 76, [110, 130, 120, 140, 100, 90][row]);
        for hole in 0..(step / 100 + row) % 5 {
            fill(23 + 3 * row, 4 + (17 * hole + 13 * row) % 72, 3, 5, 0);
        }
    }
    fill(76, 4 + step * 3 % 66, 2, 8, 147);
    fill(30 + step * 2 % 46, 5 + step % 74, 2, 1, 147);
    pixels
}

/// Frames of every stream at a step.
pub fn frames(step: usize, streams: usize) -> Vec<u8> {
    (0..streams).flat_map(|stream| frame(step + 57 * stream)).collect()
}

/// Appends a step of `streams` streams, at most [`STREAMS`], with their frames and Q-values of 0; each is rewarded.
pub fn append<E: Debug + From<Error>>(writer: &mut Writer<E>, frames: &[u8], streams: usize) {
    const ZEROS: [u8; 4 * ACTIONS * STREAMS] = [0; 4 * ACTIONS * STREAMS];
    let (scalars, images, q) = ([streams], [streams, SIDE, SIDE], [streams, ACTIONS]);
    let rewards = [1.0f32.to_le_bytes(); STREAMS];
    let rewards = &rewards.as_flattened()[..4 * streams];
    let columns = [
        ("frame", Values::new(Dtype::Uint8, &images, frames)),
        ("action", Values::new(Dtype::Uint8, &scalars, &ZEROS[..streams])),
        ("reward", Values::new(Dtype::Float32, &scalars, rewards)),
    ];
    let mut step = StepBatch::new(&columns);
    step.q = Some(Values::new(Dtype::Float32, &q, &ZEROS[..4 * ACTIONS * streams]));
    writer.append(&step, &Wait::forever()).expect("a step that fits");
}
