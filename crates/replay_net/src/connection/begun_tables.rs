//! The tables that a connection's writers and iterators began with: another one of the same name, made after that was dropped, is
//! not theirs.
//!
//! # Invariant
//!
//! Iterators, writers and waiting calls end with their table, also if another gets its name.

use crate::service::Service;
use replay_core::table::Turn;
use replay_wire::{OpenOrResume, RequestBody};

/// Name of each table, and its number. A connection has one or a few.
#[derive(Default)]
pub struct BegunTables(Vec<(String, u16)>);

impl BegunTables {
    /// The turn of a request that is about to be tried.
    pub fn turn(&mut self, service: &Service, request: &RequestBody) -> Turn {
        let name = match request {
            RequestBody::OpenWriter(OpenOrResume { open, .. }) => {
                self.0.retain(|(name, _)| *name != open.table);
                self.begin(service, &open.table);
                return Turn::default();
            }
            RequestBody::Push(push) => &push.table,
            RequestBody::Sample(sample) if sample.repeated => {
                self.begin(service, &sample.table);
                &sample.table
            }
            _ => return Turn::default(),
        };
        Turn::of_table(self.number(name))
    }

    fn begin(&mut self, service: &Service, name: &str) {
        if self.number(name).is_none()
            && let Ok(table) = service.memory().table(name)
        {
            self.0.push((name.to_owned(), table.number()));
        }
    }

    fn number(&self, name: &str) -> Option<u16> {
        let of_name = self.0.iter().find(|(one, _)| one == name);
        of_name.map(|&(_, number)| number)
    }
}
