/** CSV files as RFC 4180 has them: quoted fields may have commas, quotes and line breaks. */

/** Return the rows of a CSV text. Throws for a quote that is never closed. */
export function parseCsv(text: string): string[][] {
  const rows: string[][] = [];
  let row: string[] = [];
  let field = "";
  let quoted = false;
  const source = text.replace(/^\ufeff/, "");
  const endRow = () => {
    row.push(field);
    if (row.length > 1 || row[0] !== "") rows.push(row); // not for an empty line
    row = [];
    field = "";
  };
  for (let at = 0; at < source.length; at++) {
    const one = source[at] as string;
    if (quoted) {
      if (one !== '"') field += one;
      else if (source[at + 1] === '"') field += source[at++];
      else quoted = false;
    } else if (one === '"' && field === "") quoted = true;
    else if (one === ",") {
      row.push(field);
      field = "";
    } else if (one === "\n" || one === "\r") {
      if (one === "\r" && source[at + 1] === "\n") at++;
      endRow();
    } else field += one;
  }
  if (quoted) throw new Error("The CSV file has a quote that is never closed.");
  if (field || row.length) endRow();
  return rows;
}

/** Return rows as a CSV text. */
export function writeCsv(rows: string[][]): string {
  return rows.map((row) => row.map(quote).join(",") + "\r\n").join("");
}

// a spreadsheet would run a field that begins so as a formula
const FORMULA = /^[=+\-@\t\r]/;

function quote(field: string): string {
  const text = FORMULA.test(field) && !/^[+-]?[\d.,]+$/.test(field) ? `'${field}` : field;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
