/** How batches and files are put into words, and handed to the user. */

import { call } from "../api";
import type { BatchObject } from "../api_types";
import { download } from "../download";

const ENDED = ["completed", "failed", "expired", "cancelled"];

export function isOpen(one: BatchObject): boolean {
  return !ENDED.includes(one.status);
}

export function counts({ request_counts: { total, completed, failed } }: BatchObject): string {
  const number = (count: number) => count.toLocaleString();
  return `${number(completed)} done, ${number(failed)} failed, ${number(total)} in total`;
}

export function utc(seconds: number): string {
  return new Date(seconds * 1000).toISOString().slice(0, 16).replace("T", " ");
}

export function size(bytes: number): string {
  if (bytes < 1024) return `${bytes} B`;
  return bytes < 2 ** 20 ? `${(bytes / 1024).toFixed(1)} KiB` : `${(bytes / 2 ** 20).toFixed(1)} MiB`;
}

/** Download a file's content, with the tab's key. */
export async function downloadFile(id: string, name: string): Promise<void> {
  const response = await call(`v1/files/${encodeURIComponent(id)}/content`);
  download(name, await response.blob());
}
