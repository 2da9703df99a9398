//! The tables of a connection. Its first request about a table names it; later ones have the table's number.
//!
//! # Invariant
//!
//! A number always means the same table: iterators, writers and waiting calls end with their table, also if another gets its name.

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use base::notation::shortened;
use replay_core::memory::Memory;
use replay_core::table::Table;
use replay_link::error::{Error, Result};
use replay_wire::{MAX_NUMBERED_TABLES, Request};

/// Most bytes of a name that is kept; the longest name of a table is shorter.
const KEPT: usize = 160;

/// A connection's tables, in the order of their numbers.
#[derive(Default)]
pub struct NumberedTables(Vec<Rc<NumberedTable>>);

/// A table that a connection has named.
pub struct NumberedTable {
    name: String,
    /// The first table that had the name. Weak: a dropped table returns its memory at once.
    table: OnceCell<Weak<Table>>,
}

impl NumberedTables {
    /// The table of a request that has arrived, which may name it; `None` for a request that has none.
    ///
    /// # Errors
    /// [`Error::Protocol`](replay_wire::Error::Protocol) for a number that was not named, or not the next one.
    pub fn of(&mut self, request: &Request, memory: &Memory) -> Result<Option<Rc<NumberedTable>>> {
        let number = usize::from(request.table);
        if let Some(name) = &request.table_name {
            if number != self.0.len() + 1 || number > MAX_NUMBERED_TABLES {
                return Err(Error::protocol(format!(
                    "a request names table {number}, and the connection has numbered {} of at most {MAX_NUMBERED_TABLES}",
                    self.0.len()
                )));
            }
            self.0.push(Rc::new(NumberedTable::named(name)));
        }
        let Some(index) = number.checked_sub(1) else { return Ok(None) };
        let Some(table) = self.0.get(index) else {
            return Err(Error::protocol(format!("a request about table {number}, which has no name yet")));
        };
        // An error is the answer to the request.
        let _ = table.get(memory);
        Ok(Some(Rc::clone(table)))
    }
}

impl NumberedTable {
    /// The first table that has the name when it is asked for.
    pub fn named(name: &str) -> Self {
        NumberedTable { name: shortened(name, KEPT).into_owned(), table: OnceCell::new() }
    }

    /// The table that has the name now. For a request that goes to a writer, whose number is random: no other table has it.
    pub fn current(&self, memory: &Memory) -> Option<Arc<Table>> {
        memory.table(&self.name).ok()
    }

    /// The table.
    ///
    /// # Errors
    /// [`UnknownTable`](replay_core::Error::UnknownTable) when there has been none of the name yet, or it was dropped.
    pub fn get(&self, memory: &Memory) -> replay_core::error::Result<Arc<Table>> {
        if let Some(table) = self.table.get() {
            return table.upgrade().ok_or_else(|| Table::was_dropped(&self.name));
        }
        let table = memory.table(&self.name)?;
        self.table.get_or_init(|| Arc::downgrade(&table));
        Ok(table)
    }
}
