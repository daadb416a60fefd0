// Names without hashes: the server sends an ETag, and a rebuild changes no file names in the repository.
export default {
  base: "./",
  build: {
    outDir: "bundle",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    reportCompressedSize: true,
    rolldownOptions: {
      output: {
        entryFileNames: "page/app.js",
        chunkFileNames: "page/[name].js",
        assetFileNames: "page/app[extname]",
      },
    },
  },
};
